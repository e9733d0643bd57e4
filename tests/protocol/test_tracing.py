"""Spans on their way to a collector that runs here."""

import logging
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from penstock.protocol.config import Config
from penstock.protocol.tracing import Tracer, TracingError, check_tracing, trace_ids
from tests.collector import Collector

pytestmark = pytest.mark.slow


@pytest.fixture
def collector() -> Iterator[Collector]:
    one = Collector()
    yield one
    one.close()


def test_spans_of_two_processes_join(collector: Collector) -> None:
    """The two processes have exchanged no message. An address may have the path."""
    spans = {}
    for process, name, path in (
        ("gateway.1", "request", ""),
        ("tokenizer.2", "tokenize", "/v1/traces/"),
    ):
        tracer = Tracer(Config(otlp_endpoint=collector.address + path), process)
        begin = time.monotonic() - 2.0
        tracer.span(
            name,
            "mine",
            begin,
            {"gen_ai.usage.output_tokens": 5},
            is_root=name == "request",
            events={"first token": begin + 1.0},
            error="no" if name == "request" else "",
        )
        tracer._processor.shutdown()
        about, (spans[name],) = collector.receive()
        assert about["service.name"] == f"penstock-{process.partition('.')[0]}"
        assert about["service.instance.id"] == process
    root, child = spans["request"], spans["tokenize"]
    trace_id, root_id = trace_ids("mine")
    assert root.trace_id == child.trace_id == trace_id.to_bytes(16)
    assert root.span_id == child.parent_span_id == root_id.to_bytes(8)
    assert root.parent_span_id == b""
    assert child.span_id not in (root.span_id, bytes(8))
    assert (root.status.code, root.status.message) == (2, "no")
    assert child.status.code == 0
    attributes = {one.key: one.value for one in child.attributes}
    assert attributes["gen_ai.request.id"].string_value == "mine"
    assert attributes["gen_ai.usage.output_tokens"].int_value == 5
    (event,) = child.events
    assert event.name == "first token"
    moments = (child.start_time_unix_nano, event.time_unix_nano, child.end_time_unix_nano)
    assert 0.99e9 < moments[1] - moments[0] < 1.01e9
    assert moments[2] - moments[0] >= 1.99e9
    assert abs(time.time_ns() - moments[2]) < 3600e9


def test_what_is_left_goes_out_when_the_process_ends(collector: Collector) -> None:
    code = (
        "import sys; from penstock.protocol.config import Config; "
        "from penstock.protocol.tracing import Tracer; "
        "Tracer(Config(otlp_endpoint=sys.argv[1]), 'x').span('a', 'b', 0.0)"
    )
    command = [sys.executable, "-P", "-c", code, collector.address]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0
    assert collector.receive()[1][0].name == "a"


def test_a_collector_that_is_gone_harms_nothing(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    collector.close()
    tracer = Tracer(Config(otlp_endpoint=collector.address), "gateway.1")
    tracer.span("request", "a", time.monotonic())
    with caplog.at_level(logging.ERROR):
        tracer._processor.shutdown()
    assert "Failed to export" in caplog.text


def test_without_a_collector_there_is_nothing() -> None:
    tracer = Tracer(Config(), "gateway.1")
    assert not tracer.is_on
    code = "import penstock.services.gateway.process, sys; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


def test_an_address_that_is_none() -> None:
    with pytest.raises(TracingError, match="got 'localhost:4318', expected http://HOST"):
        check_tracing(Config(otlp_endpoint="localhost:4318"))


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(TracingError, match=r"not installed: pip install 'penstock-llm\[otel\]'"):
        check_tracing(Config(otlp_endpoint="http://127.0.0.1:1"))
