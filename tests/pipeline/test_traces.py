"""One request's way through the processes, as reported to an OpenTelemetry collector."""

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from penstock.protocol.client.client import Client
from penstock.protocol.tracing import trace_ids
from tests.collector import Collector
from tests.pipeline.conftest import START_TIMEOUT, Pipeline

pytestmark = pytest.mark.pipeline
PARTS = {
    "request": "gateway.1",
    "tokenize": "tokenizer.1",
    "queue": "scheduler.1",
    "prefill": "scheduler.1",
    "decode": "scheduler.1",
    "detokenize": "detokenizer.1",
}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    one = Collector()
    yield one
    one.close()


@pytest.fixture(scope="module")
def traced(collector: Collector, pipeline: Callable[..., Pipeline]) -> Pipeline:
    return pipeline("--otlp-endpoint", collector.address)


def test_each_process_tells_its_part(collector: Collector, traced: Pipeline) -> None:
    with Client(traced.endpoint, timeout=START_TIMEOUT) as client:
        client.generate("count from 3 to 9", request_id="a")
    spans, tellers = {}, {}
    while len(spans) < len(PARTS):
        about, batch = collector.receive()
        for span in batch:
            spans[span.name] = span
            tellers[span.name] = about["service.instance.id"]
    assert tellers == PARTS
    trace_id, root_id = trace_ids("a")
    assert {span.trace_id for span in spans.values()} == {trace_id.to_bytes(16)}
    root = spans.pop("request")
    assert (root.span_id, root.parent_span_id) == (root_id.to_bytes(8), b"")
    assert {span.parent_span_id for span in spans.values()} == {root_id.to_bytes(8)}
    order = [spans[name] for name in ("tokenize", "queue", "prefill", "decode")]
    for before, after in pairwise(order):
        assert before.start_time_unix_nano <= after.start_time_unix_nano


def test_an_aborted_request_has_all_its_parts(collector: Collector, traced: Pipeline) -> None:
    """None of its processes keeps it."""
    with Client(traced.endpoint, timeout=START_TIMEOUT) as client:
        stream = client.stream("count from 1 to 99", max_tokens=2000, request_id="b")
        next(iter(stream))
        stream.abort()
    trace_id = trace_ids("b")[0].to_bytes(16)
    names: set[str] = set()
    while names != set(PARTS):
        names |= {span.name for span in collector.receive()[1] if span.trace_id == trace_id}
