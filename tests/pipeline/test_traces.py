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


def test_each_process_tells_its_part(
    collector: Collector, pipeline: Callable[..., Pipeline]
) -> None:
    one = pipeline("--otlp-endpoint", collector.address)
    with Client(one.endpoint, timeout=START_TIMEOUT) as client:
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
