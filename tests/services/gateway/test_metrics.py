"""Counters and histograms, with moments that the test makes up."""

from collections.abc import Callable
from typing import Any

import pytest

from penstock.protocol.messages.client import (
    JSON,
    AbortRequest,
    ErrorReply,
    GenerateRequest,
    StatusRequest,
)
from penstock.protocol.messages.status import (
    END_TO_END,
    FIRST_TOKEN,
    INTER_TOKEN,
    Histogram,
    Metrics,
    ProcessStatus,
    SchedulerStatus,
    token_bounds,
)
from penstock.protocol.messages.supervisor import SupervisorReport
from penstock.services.gateway.request import Client, Connection, Request, Share
from tests.services.gateway.conftest import PROMPT, GatewayHarness, request


def entry(accepted_at: float, **fields: Any) -> Request:
    client = Client((b"c",), JSON, Connection(), Share(""))
    one = Request(GenerateRequest(prompt="p", **fields), "a", client)
    one.accepted_at, one.num_prompt_tokens, one.num_cached_tokens = accepted_at, 30, 16
    return one


def counted(histogram: Histogram) -> dict[float, int]:
    """Bound → how many values are in the interval that ends there."""
    ends = [*histogram.bounds, float("inf")]
    return {end: n for end, n in zip(ends, histogram.counts, strict=True) if n}


def test_a_request_from_its_acceptance_to_its_answer() -> None:
    metrics, its = Metrics.empty(4096), entry(accepted_at=100.0, max_tokens=5)
    its.phase_seconds = (0.02, 0.9)
    for num_tokens, now in ((1, 100.2), (3, 100.26), (1, 100.5)):
        its.token_ids += [7] * num_tokens
        its.record_tokens(metrics, num_tokens, now)
    its.record_end(metrics, its.reply("length"), 100.6)
    assert counted(metrics.time_to_first_token_seconds) == {0.25: 1}
    assert metrics.time_to_first_token_seconds.sum == pytest.approx(0.2)
    assert counted(metrics.inter_token_latency_seconds) == {0.075: 1, 0.3: 1}
    assert metrics.inter_token_latency_seconds.sum == pytest.approx(0.3)
    assert counted(metrics.e2e_request_latency_seconds) == {0.8: 1}
    assert (metrics.prompt_tokens, metrics.generation_tokens) == (30, 5)
    assert metrics.prefix_cache_hits == 16
    assert counted(metrics.request_prompt_tokens) == {50.0: 1}
    assert counted(metrics.request_generation_tokens) == {5.0: 1}
    assert (metrics.request_success, metrics.request_failed) == ({"length": 1}, {})
    assert counted(metrics.request_queue_time_seconds) == {0.3: 1}
    assert counted(metrics.request_prefill_time_seconds) == {1.0: 1}
    assert metrics.request_decode_time_seconds.sum == pytest.approx(0.3)
    assert metrics.request_inference_time_seconds.sum == pytest.approx(1.2)
    assert metrics.request_time_per_output_token_seconds.sum == pytest.approx(0.3 / 4)
    assert counted(metrics.request_params_max_tokens) == {5.0: 1}
    assert counted(metrics.request_params_n) == {1.0: 1}


def test_n_is_counted_once_though_each_answer_is_a_request() -> None:
    metrics = Metrics.empty(4096)
    for num_answers in (3, 0, 0, 1):
        one = entry(1.0, num_answers=num_answers)
        one.record_end(metrics, one.reply("abort"), 2.0)
    assert metrics.request_params_n.sum == 4.0
    assert counted(metrics.request_params_n) == {1.0: 1, 5.0: 1}
    assert counted(metrics.request_decode_time_seconds) == {}
    assert counted(metrics.request_params_max_tokens) == {}


def test_errors_are_in_no_histogram() -> None:
    metrics = Metrics.empty(4096)
    for code in ("failed", "overloaded", "failed"):
        error = ErrorReply(code=code, message="")  # type: ignore[arg-type]
        entry(1.0).record_end(metrics, error, 2.0)
    assert metrics.request_failed == {"failed": 2, "overloaded": 1}
    assert counted(metrics.e2e_request_latency_seconds) == {}


def test_a_value_at_a_bound_is_within_it() -> None:
    histogram = Histogram.of([1.0, 2.0])
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.add(value)
    assert (histogram.counts, histogram.sum) == ([2, 2, 1], 7.5)


def test_bounds_ascend() -> None:
    assert token_bounds(4096) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]
    assert token_bounds(100)[-2:] == [50, 100]
    for bounds in (FIRST_TOKEN, INTER_TOKEN, END_TO_END):
        assert bounds == sorted(set(bounds))


def test_the_gateway_counts(start_gateway: Callable[..., GatewayHarness]) -> None:
    harness = start_gateway()
    client = harness.connect()
    harness.submit(client, "a", "b", "gone", stream=True)
    harness.send_tokens("a", 0, 2)
    harness.send_tokens("a", 1, 4, cached_tokens=3)  # repeats a token
    harness.send_tokens("a", 4, 4, finish_reason="stop")
    harness.send(client, AbortRequest(request_id="b"), request("c", max_tokens=9999))
    replies = [harness.receive_reply(client) for _ in range(6)]
    assert replies[-1].code == "invalid"
    client.close()
    harness.run_until(lambda: len(harness.gateway.connections) == 0)
    harness.run_heartbeats(2)
    other = harness.connect()
    harness.send(other, StatusRequest(), StatusRequest(metrics=True))
    assert harness.receive_reply(other).metrics is None
    metrics = harness.receive_reply(other).metrics
    assert metrics.request_success == {"stop": 1, "abort": 2}
    assert metrics.request_failed == {"invalid": 1}
    assert (metrics.prompt_tokens, metrics.generation_tokens) == (len(PROMPT), 4)
    assert sum(metrics.time_to_first_token_seconds.counts) == 1
    assert sum(metrics.inter_token_latency_seconds.counts) == 1
    assert sum(metrics.e2e_request_latency_seconds.counts) == 3
    assert metrics.e2e_request_latency_seconds.sum < 100


def test_who_waits_for_the_scheduler_gets_metrics_too(
    start_gateway: Callable[..., GatewayHarness],
) -> None:
    harness = start_gateway()
    client = harness.connect()
    harness.send(client, StatusRequest(fresh=True, metrics=True), StatusRequest(fresh=True))
    harness.run_until(lambda: len(harness.gateway.status.for_report) == 2)
    harness.detokenizer.send(SchedulerStatus(epoch=1, ready=False))
    assert harness.receive_reply(client).metrics is not None
    assert harness.receive_reply(client).metrics is None


def test_the_newest_report_of_the_supervisor(start_gateway: Callable[..., GatewayHarness]) -> None:
    harness = start_gateway()
    for uptime in (1.0, 2.0):
        process = ProcessStatus(
            name="worker.1", pid=5, uptime=uptime, restarts=0, counters={"bad_frames": 1}
        )
        harness.detokenizer.send(SupervisorReport([process]))
    harness.run_until(
        lambda: (
            harness.gateway.status.processes and harness.gateway.status.processes[0].uptime == 2.0
        )
    )
    client = harness.connect()
    harness.send(client, StatusRequest())
    assert harness.receive_reply(client).processes == [process]
