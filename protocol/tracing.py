"""Traces of requests in OpenTelemetry, where `--otlp-endpoint` is given.

Every process reports its part of a request as a span. The ids of the trace and of its root span
follow from the request's id, so that processes need not exchange them.
"""

import atexit
import os
import time
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from penstock.protocol.config import Config

TRACES_PATH = "/v1/traces"  # path of traces in OTLP over HTTP
# timeout of exporting a batch of spans, seconds; a process that exits waits for up to four batches
EXPORT_TIMEOUT = 1.0


class TracingError(ValueError):
    """Tracing that is requested, but impossible: the reason."""


def check_tracing(config: Config) -> None:
    """Raise TracingError for an invalid address, or without the OpenTelemetry SDK."""
    address = config.otlp_endpoint
    if not address:
        return
    if not address.startswith(("http://", "https://")):
        raise TracingError(f"--otlp-endpoint: got {address!r}, expected http://HOST:PORT")
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ImportError as error:
        raise TracingError(
            f"--otlp-endpoint is {address}, but {error.name} is not installed: "
            "pip install 'penstock-llm[otel]'"
        ) from error


class Tracer:
    """Sender of spans to the collector, in its own thread; does nothing without a collector."""

    def __init__(self, config: Config, process: str) -> None:
        """Start the thread. process: name of this process. Raises TracingError."""
        check_tracing(config)
        self.is_on = bool(config.otlp_endpoint)
        if not self.is_on:
            return
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk import trace as sdk
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._trace, self._sdk = trace, sdk
        service = f"penstock-{process.partition('.')[0]}"
        about = {"service.name": service, "service.instance.id": process}
        self._resource = Resource.create(about)
        address = config.otlp_endpoint.rstrip("/").removesuffix(TRACES_PATH) + TRACES_PATH
        self._processor = BatchSpanProcessor(OTLPSpanExporter(address, timeout=EXPORT_TIMEOUT))
        atexit.register(self._processor.shutdown)

    def span(
        self,
        name: str,
        request_id: str,
        begin: float,
        attributes: Mapping[str, Any] = {},
        *,
        end: float | None = None,
        events: Mapping[str, float] = {},
        error: str = "",
        is_root: bool = False,
    ) -> None:
        """Report a part of a request if `is_on`. Times are of `time.monotonic`; None means now."""
        trace = self._trace
        trace_id, root_id = trace_ids(request_id)
        sampled = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        root = trace.SpanContext(trace_id, root_id, not is_root, sampled)
        own = trace.SpanContext(trace_id, int.from_bytes(os.urandom(8)), False, sampled)
        status = trace.StatusCode.ERROR if error else trace.StatusCode.UNSET
        self._processor.on_end(
            self._sdk.ReadableSpan(
                name,
                context=root if is_root else own,
                parent=None if is_root else root,
                resource=self._resource,
                attributes={"gen_ai.request.id": request_id, **attributes},
                events=[
                    self._sdk.Event(event, timestamp=_since_1970(moment))
                    for event, moment in events.items()
                ],
                kind=trace.SpanKind.SERVER if is_root else trace.SpanKind.INTERNAL,
                status=trace.Status(status, error or None),
                start_time=_since_1970(begin),
                end_time=_since_1970(time.monotonic() if end is None else end),
            )
        )


def trace_ids(request_id: str) -> tuple[int, int]:
    """Return the ids of a request's trace and its root span."""
    trace_id = blake2b(request_id.encode()).digest()[:16]
    root_id = blake2b(f"{request_id}root".encode()).digest()[:8]
    return int.from_bytes(trace_id), int.from_bytes(root_id)


def _since_1970(moment: float) -> int:
    """Return the nanoseconds since 1970 of a moment of `time.monotonic`."""
    return time.time_ns() - time.monotonic_ns() + round(moment * 1e9)
