"""What Prometheus reads."""

from prometheus_client.parser import text_string_to_metric_families

from penstock.protocol.metrics import Histogram, Metrics
from penstock.protocol.status import ProcessStatus, SchedulerStatus, StatusReply
from penstock.services.http.metrics import render

HISTOGRAM = Histogram(bounds=[0.1, 1.0], counts=[2, 1, 1], sum=3.5)
STATUS = StatusReply(
    ready=True,
    model="m",
    num_requests=3,
    tokenizers={},
    schedulers=[
        SchedulerStatus(
            epoch=1,
            ready=True,
            num_running=2,
            num_waiting=1,
            num_blocks=10,
            num_free_blocks=4,
            gpu_idle_us=(5.0, 50.0),
        ),
        SchedulerStatus(epoch=2, ready=True, replica=1, num_running=9, num_steps=5),
    ],
    num_bad_frames=0,
    processes=[
        ProcessStatus(name="http.1", pid=1, uptime=2.0, restarts=1, counters={"waits_total": 4.0}),
        ProcessStatus(name="http.2", pid=2, uptime=3.0, restarts=0),
    ],
    metrics=Metrics(
        request_success={"stop": 2},
        request_failed={"invalid": 1},
        prompt_tokens=7,
        time_to_first_token_seconds=HISTOGRAM,
        inter_token_latency_seconds=HISTOGRAM,
        e2e_request_latency_seconds=HISTOGRAM,
        request_prompt_tokens=HISTOGRAM,
        request_generation_tokens=HISTOGRAM,
    ),
)


def samples(status: StatusReply) -> dict[tuple[str, ...], float]:
    text = render(status, "demo").decode()
    return {
        (sample.name, *(value for name, value in sample.labels.items() if name != "model_name")): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_values() -> None:
    found = samples(STATUS)
    expected = {
        ("penstock:num_requests_running", "0"): 2,
        ("penstock:num_requests_running", "1"): 9,
        ("penstock:num_requests_waiting", "0"): 1,
        ("penstock:kv_cache_usage_perc", "0"): 0.6,
        ("penstock:kv_cache_usage_perc", "1"): 0,
        ("penstock:num_steps_total", "1"): 5,
        ("penstock:gpu_idle_seconds", "0.99", "0"): 5e-5,
        ("penstock:request_success_total", "stop"): 2,
        ("penstock:request_failed_total", "invalid"): 1,
        ("penstock:prompt_tokens_total",): 7,
        ("penstock:prefix_cache_hits_total",): 0,
        ("penstock:process_restarts_total", "http.1"): 1,
        ("penstock:process_uptime_seconds", "http.2"): 3,
        ("penstock:process_waits_total", "http.1"): 4,
    }
    assert {name: found[name] for name in expected} == expected


def test_buckets_are_summed() -> None:
    found = samples(STATUS)
    name = "penstock:time_to_first_token_seconds"
    assert [found[(f"{name}_bucket", bound)] for bound in ("0.1", "1.0", "+Inf")] == [2, 3, 4]
    assert found[(f"{name}_count",)] == 4
    assert found[(f"{name}_sum",)] == 3.5


def test_what_is_not_there_is_left_out() -> None:
    alone = StatusReply(
        ready=False, model="m", num_requests=0, tokenizers={}, schedulers=[], num_bad_frames=0
    )
    assert samples(alone) == {
        ("penstock:ready",): 0,
        ("penstock:num_requests_open",): 0,
        ("penstock:bad_frames_total",): 0,
    }
