"""Health and metrics."""

import json
import re
from pathlib import Path
from typing import get_type_hints

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics import exposition
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.config import Config
from penstock.protocol.messages.status import (
    Histogram,
    Metrics,
    ModelStatus,
    ProcessStatus,
    SchedulerStatus,
    StatusReply,
)
from penstock.services.http import status as health
from penstock.services.http.shared.errors import ApiError
from penstock.services.http.status import HealthCheck, StatusCollector, missing, render


def status(tokenizers: dict[str, int], scheduler: SchedulerStatus | None) -> StatusReply:
    return StatusReply(
        ready=False,
        model="m",
        num_requests=0,
        tokenizers=tokenizers,
        schedulers=[scheduler] if scheduler else [],
        num_bad_frames=0,
    )


SILENT = SchedulerStatus(epoch=1, ready=False, workers=["w"])
WHOLE = msgspec.structs.replace(SILENT, detokenizers={"d": 0})
ALL_READY = msgspec.structs.replace(WHOLE, workers_ready=True)


@pytest.mark.parametrize(
    ("tokenizers", "scheduler", "sentence"),
    [
        ({}, None, "no scheduler, no tokenizer, no detokenizer, no worker"),
        ({"t": 0}, SILENT, "no detokenizer"),
        ({"t": 0}, WHOLE, "not all workers are there"),
        (
            {"t": 0},
            ALL_READY,
            "the scheduler is silent, or serves a gateway that was started later",
        ),
    ],
)
def test_the_missing_stage(
    tokenizers: dict[str, int], scheduler: SchedulerStatus | None, sentence: str
) -> None:
    assert missing(status(tokenizers, scheduler)) == sentence


def test_time_at_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(health.time, "monotonic", lambda: now)
    watch = HealthCheck(AsyncClient(), step_timeout=60.0)

    def look(num_steps: int, num_running: int, epoch: int = 1) -> float:
        one = SchedulerStatus(epoch=epoch, ready=True, num_steps=num_steps, num_running=num_running)
        gets_on = SchedulerStatus(epoch=3, ready=True, num_steps=int(now), num_running=1)
        return watch._seconds_at_step([gets_on, one])

    assert look(5, 0) == 0
    now += 500
    assert look(5, 1) == 0, "nothing ran at the look before"
    now += 70
    assert look(5, 1) == 70
    assert look(5, 1, epoch=2) == 0, "another scheduler"
    now += 70
    assert look(6, 1, epoch=2) == 0
    now += 70
    assert look(6, 0, epoch=2) == 0


@pytest.mark.anyio
@pytest.mark.parametrize("is_draining", [False, True])
async def test_a_pipeline_that_drains_is_not_ready(
    monkeypatch: pytest.MonkeyPatch, is_draining: bool
) -> None:
    async def report(*_: object, **__: object) -> StatusReply:
        one = status({"t": 0}, SchedulerStatus(epoch=1, ready=True))
        one.ready, one.draining = True, is_draining
        return one

    monkeypatch.setattr(AsyncClient, "status", report)
    watch = HealthCheck(AsyncClient(), step_timeout=60.0)
    if is_draining:
        with pytest.raises(ApiError, match="accepts no requests"):
            await watch.check_ready()
    else:
        await watch.check_ready()


def test_the_model_that_does_not_serve_is_named() -> None:
    ready = SchedulerStatus(epoch=1, ready=True)
    both = status({"t": 0}, ready)
    both.models = [
        ModelStatus(
            name=name, model="m", ready=False, num_requests=0, tokenizers={"t": 0}, schedulers=its
        )
        for name, its in (("one", [ready]), ("org/two", []))
    ]
    assert not both.all_serve
    assert missing(both) == "org/two: no scheduler, no detokenizer, no worker"


HISTOGRAMS = [name for name, kind in get_type_hints(Metrics).items() if kind is Histogram]
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
            block_size=16,
            step_tokens=HISTOGRAM,
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
        **dict.fromkeys(HISTOGRAMS, HISTOGRAM),
    ),
)


def samples(status: StatusReply) -> dict[tuple[str, ...], float]:
    text = render(status, Config()).decode()
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
        ("penstock:iteration_tokens_total_count", "0"): 4,
        ("penstock:request_queue_time_seconds_count",): 4,
        ("penstock:cache_config_info", "16", "auto", "True", "0.9", "10", "0"): 1,
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
    assert samples(status({}, None)) == {
        ("penstock:ready",): 0,
        ("penstock:num_requests_open",): 0,
        ("penstock:bad_frames_total",): 0,
    }


OF_VLLM = (
    "num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total "
    "prefix_cache_hits_total num_preemptions_total prompt_tokens_total generation_tokens_total "
    "request_success_total iteration_tokens_total time_to_first_token_seconds "
    "inter_token_latency_seconds time_per_output_token_seconds e2e_request_latency_seconds "
    "request_time_per_output_token_seconds request_queue_time_seconds "
    "request_prefill_time_seconds request_decode_time_seconds request_inference_time_seconds "
    "request_prompt_tokens request_generation_tokens request_params_max_tokens request_params_n "
    "cache_config_info"
)


def shown() -> set[str]:
    """Names of samples, and of the histograms that they are of."""
    names = {name for name, *_ in samples(STATUS)}
    return names | {re.sub("_(bucket|sum|count)$", "", name) for name in names}


def test_names_of_vllm() -> None:
    assert {f"penstock:{name}" for name in OF_VLLM.split()} <= shown()


def test_the_text_is_what_promtool_accepts() -> None:
    """Its rules of names and types; a histogram with `_total` has vLLM's name."""
    text = render(STATUS, Config()).decode()
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    for family in families:
        labels = {label for sample in family.samples for label in sample.labels}
        assert family.type in ("counter", "gauge", "histogram", "summary"), family.name
        assert family.documentation
        assert ("quantile" in labels) == (family.type == "summary"), family.name
        assert ("le" in labels) == (family.type == "histogram"), family.name
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples)
        elif family.name != "penstock:iteration_tokens_total":
            assert not family.name.endswith(("_total", "_count", "_sum", "_bucket")), family.name


def test_openmetrics_parses_it_strictly() -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(STATUS, Config()))
    text = exposition.generate_latest(registry).decode()
    assert len(list(openmetrics.text_string_to_metric_families(text))) > 30


def test_the_dashboard_names_what_there_is() -> None:
    path = Path(__file__).parents[3] / "examples" / "grafana.json"
    dashboard = json.loads(path.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [one["query"]["query"] for one in dashboard["templating"]["list"][1:]]
    named = {name for query in queries for name in re.findall(r"penstock:\w+", query)}
    assert len(named) > 20
    assert named <= shown(), named - shown()
    labels = {"model", "datasource", "__rate_interval"}
    assert set(re.findall(r"\$(\w+)", " ".join(queries))) <= labels
    by = {label for query in queries for label in re.findall(r"by \((\w+)\)", query)}
    text = render(STATUS, Config()).decode()
    assert all(re.search(rf'[{{,]{label}="', text) for label in by)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(places) == len(set(places))


def test_each_model_has_a_label() -> None:
    """A family appears once, with a sample for each model."""
    names = ("one", "org/two")
    config = Config(models=tuple(Config(served_model_name=name) for name in names))
    fields = {name: getattr(STATUS, name) for name in ModelStatus.__struct_fields__}
    models = [ModelStatus(**fields | {"name": name}) for name in names]
    text = render(msgspec.structs.replace(STATUS, models=models), config).decode()
    assert text.count("# TYPE penstock:num_requests_running gauge") == 1
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name in ("penstock:ready", "penstock:prompt_tokens", "penstock:num_steps"):
        samples = [one for one in families[name].samples if one.name.startswith(name)]
        assert {one.labels["model_name"] for one in samples} == set(names)


def test_a_name_is_escaped() -> None:
    name = 'a\\n"b\\'
    text = render(STATUS, Config(served_model_name=name)).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["penstock:ready"].samples[0].labels["model_name"] == name
