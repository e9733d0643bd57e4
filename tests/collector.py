"""A collector of OpenTelemetry's spans, over HTTP."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from queue import Queue
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """Takes what is exported to it."""

    def __init__(self) -> None:
        self.batches: Queue[tuple[str, ExportTraceServiceRequest]] = Queue()
        batches = self.batches

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                batches.put((self.path, ExportTraceServiceRequest.FromString(body)))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()

    def receive(self) -> tuple[dict[str, str], list[Any]]:
        """Return the next batch: about the process, and its spans."""
        path, batch = self.batches.get(timeout=60)
        assert path == "/v1/traces"
        (told,) = batch.resource_spans
        about = {one.key: one.value.string_value for one in told.resource.attributes}
        return about, list(told.scope_spans[0].spans)
