"""The span of a whole request."""

from collections.abc import Callable
from typing import Any

from penstock.protocol.messages.client import AbortRequest
from penstock.protocol.messages.status import SchedulerStatus
from penstock.protocol.tracing import trace_ids
from tests.collector import Collector
from tests.services.gateway.conftest import PROMPT, GatewayHarness


def test_each_request_is_a_root(start_gateway: Callable[..., GatewayHarness]) -> None:
    collector = Collector()
    harness = start_gateway(otlp_endpoint=collector.address)
    client = harness.connect()
    harness.submit(client, "a", "b")
    harness.send_tokens("a", 0, 2)
    harness.detokenizer.send(SchedulerStatus(epoch=1, ready=True))  # a second attempt begins
    harness.run_until(lambda: harness.gateway.default.router.statuses)
    harness.send_tokens("a", 2, 3, cached_tokens=4, finish_reason="length")
    harness.send(client, AbortRequest(request_id="b"))
    for _ in range(3):
        harness.receive_reply(client)
    harness.gateway.default.tracer._processor.shutdown()
    spans = {span.span_id: span for span in collector.receive()[1]}
    collector.close()
    first, second = (spans[trace_ids(name)[1].to_bytes(8)] for name in "ab")
    assert first.name == "request"
    values = attributes(first)
    assert values["gen_ai.request.id"].string_value == "a"
    assert values["gen_ai.usage.input_tokens"].int_value == len(PROMPT)
    assert values["gen_ai.usage.output_tokens"].int_value == 3
    assert values["penstock.cached_tokens"].int_value == 4
    assert values["penstock.num_attempts"].int_value == 2
    assert finish_reason(first) == "length"
    (event,) = first.events
    assert event.name == "first token"
    assert first.start_time_unix_nano < event.time_unix_nano < first.end_time_unix_nano
    assert (finish_reason(second), list(second.events)) == ("abort", [])


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: one.value for one in span.attributes}


def finish_reason(span: Any) -> str:
    reasons = attributes(span)["gen_ai.response.finish_reasons"].array_value.values
    return str(reasons[0].string_value)
