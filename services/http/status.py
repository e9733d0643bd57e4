"""Status, health and metrics of the pipeline.

`/metrics` has Prometheus's text format, with vLLM's names for the same values. The gateway keeps
the counters, so all http processes return the same values: scrape any process.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from itertools import accumulate
from operator import add
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from starlette.responses import Response

from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.config import DISTRIBUTION, Config
from penstock.protocol.messages.status import (
    Histogram,
    Metrics,
    ModelStatus,
    ProcessStatus,
    SchedulerStatus,
    StatusReply,
)
from penstock.services.http.shared.app_state import Models, Operation, Texts
from penstock.services.http.shared.errors import ApiError, json_response

STATUS_TIMEOUT = 2.0  # seconds to wait for a report of the scheduler, sent every half second
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
_HISTOGRAMS = {
    "time_to_first_token_seconds": "From a request's arrival to its first token.",
    "inter_token_latency_seconds": "Between two tokens of a request.",
    "time_per_output_token_seconds": "inter_token_latency_seconds, by vLLM's older name.",
    "e2e_request_latency_seconds": "From a request's arrival to its answer.",
    "request_queue_time_seconds": "In the scheduler's queue.",
    "request_prefill_time_seconds": "From a request's first step to its first token.",
    "request_decode_time_seconds": "From a request's first token to its last.",
    "request_inference_time_seconds": "Prefill and decode of a request.",
    "request_time_per_output_token_seconds": "Decode time per token after the first, by request.",
    "request_prompt_tokens": "Tokens of prompts.",
    "request_generation_tokens": "Tokens of answers.",
    "request_params_max_tokens": "max_tokens of requests.",
    "request_params_n": "n of requests.",
}
# metric → field with its value, if the field has another name
_OTHER_NAMES = {
    "prefix_cache_queries": "prompt_tokens",
    "time_per_output_token_seconds": "inter_token_latency_seconds",
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of answered requests.",
    "generation_tokens": "Generated tokens.",
    "prefix_cache_queries": "Prompt tokens that were looked for in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
}
_OF_SCHEDULER = {
    "num_requests_running": (GaugeMetricFamily, "num_running", "Requests in the batch."),
    "num_requests_waiting": (GaugeMetricFamily, "num_waiting", "Requests in the queue."),
    "kv_cache_usage_perc": (GaugeMetricFamily, "kv_usage", "Share of KV blocks in use; 1 is all."),
    "num_preemptions": (CounterMetricFamily, "num_preemptions", "Preempted sequences."),
    "num_recomputed_tokens": (
        CounterMetricFamily,
        "num_recomputed_tokens",
        "Tokens whose KV was computed again, after a preemption or the death of a worker.",
    ),
    "kv_offload_hits": (
        CounterMetricFamily,
        "num_offload_hits",
        "Tokens whose KV was copied back from the host tier.",
    ),
    "kv_offload_blocks": (
        GaugeMetricFamily,
        "num_offloaded_blocks",
        "Slots of the host tier in use.",
    ),
    "num_steps": (CounterMetricFamily, "num_steps", "Steps of the model."),
}
_BY_REPLICA = ["model_name", "replica"]


class HealthCheck:
    """Health checks of the pipeline on request, one at a time, with a memory of running steps."""

    def __init__(self, client: AsyncClient, step_timeout: float) -> None:
        self._client = client
        self._step_timeout = step_timeout
        # (epoch of a scheduler, its running step) → time when the step was first seen
        self._since: dict[tuple[int, int], float] = {}
        self._running: asyncio.Future[None] | None = None

    async def check(self) -> None:
        """Raise ApiError (503) if a stage is missing or a step takes too long.

        Concurrent callers share the result of a running check, because the gateway answers only a
        few queries at a time.
        """
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(self._check())
        await asyncio.shield(self._running)

    async def _check(self) -> None:
        try:
            status = await status_of(self._client, fresh=True)
        except ApiError:
            _check_serves(await status_of(self._client))
            raise ApiError(503, "the scheduler does not report") from None
        _check_serves(status)
        seconds = self._seconds_at_step(status.schedulers)
        if seconds > self._step_timeout:
            raise ApiError(503, f"no step has ended for {seconds:.0f} s")

    async def check_ready(self) -> None:
        """Raise ApiError (503) if the gateway's last report has a missing stage or is draining."""
        status = await status_of(self._client)
        _check_serves(status)
        if status.draining:
            raise ApiError(503, "the pipeline is stopping and accepts no requests")

    def _seconds_at_step(self, schedulers: list[SchedulerStatus]) -> float:
        """Return the longest time since a step that still runs was first seen."""
        now = time.monotonic()
        busy = (scheduler for scheduler in schedulers if scheduler.num_running)
        steps = [(scheduler.epoch, scheduler.num_steps) for scheduler in busy]
        self._since = {step: self._since.get(step, now) for step in steps}
        return now - min(self._since.values(), default=now)


async def status_of(client: AsyncClient, **which: bool) -> StatusReply:
    """Return the result of `AsyncClient.status`. Raises ApiError after STATUS_TIMEOUT."""
    try:
        return await asyncio.wait_for(client.status(**which), STATUS_TIMEOUT)
    except TimeoutError:
        raise ApiError(503, "the gateway does not answer") from None


def _check_serves(status: StatusReply) -> None:
    if not status.all_serve:
        raise ApiError(503, missing(status))


def missing(status: StatusReply) -> str:
    """Return the reason why a pipeline can't serve: the missing stages of its models."""
    waiting = [model for model in status.by_model if not model.serves]
    names = (f"{model.name}: " * bool(status.models) for model in waiting)
    return "; ".join(map(add, names, map(_missing, waiting)))


def _missing(status: ModelStatus) -> str:
    scheduler = status.scheduler
    stages = {
        "scheduler": scheduler is not None,
        "tokenizer": bool(status.tokenizers),
        "detokenizer": bool(scheduler and scheduler.detokenizers),
        "worker": bool(scheduler and scheduler.workers),
    }
    names = [name for name, is_there in stages.items() if not is_there]
    if names:
        return f"no {', no '.join(names)}"
    if scheduler and scheduler.workers_ready:
        return "the scheduler is silent, or serves a gateway that was started later"
    return "not all workers are there"


class StatusCollector:
    """Metrics of a status of the pipeline, for a registry of prometheus_client."""

    def __init__(self, status: StatusReply, config: Config) -> None:
        self._status = status
        self._models = list(zip(config.by_model(), status.by_model, strict=True))

    def collect(self) -> Iterator[Metric]:
        ready = [(name, model.ready) for name, model in self._named()]
        yield _family(GaugeMetricFamily, "ready", "1 if every stage is there.", ready)
        number = [(name, model.num_requests) for name, model in self._named()]
        yield _family(GaugeMetricFamily, "num_requests_open", "Unanswered requests.", number)
        bad = [(self._models[0][0].model_name, self._status.num_bad_frames)]
        yield _family(CounterMetricFamily, "bad_frames", "Undecodable frames.", bad)
        if self._status.schedulers:
            yield from self._of_schedulers()
        if counted := [(name, model.metrics) for name, model in self._named() if model.metrics]:
            yield from _of_requests(counted)
        yield from _of_processes(self._status.processes)

    def _named(self) -> Iterator[tuple[str, ModelStatus]]:
        return ((config.model_name, model) for config, model in self._models)

    def _replicas(self) -> Iterator[tuple[list[str], SchedulerStatus]]:
        """Yield each replica of each model, with its labels."""
        for name, model in self._named():
            for scheduler in model.schedulers:
                yield [name, str(scheduler.replica)], scheduler

    def _of_schedulers(self) -> Iterator[Metric]:
        for name, (kind, field, text) in _OF_SCHEDULER.items():
            family = kind(f"penstock:{name}", text, labels=_BY_REPLICA)
            for labels, scheduler in self._replicas():
                family.add_metric(labels, getattr(scheduler, field))
            yield family
        name = "penstock:gpu_idle_seconds"
        idle = Metric(name, "The GPU's wait between two recent steps.", "summary")
        name = "penstock:iteration_tokens_total"
        steps = HistogramMetricFamily(name, "Tokens that a step computes.", labels=_BY_REPLICA)
        for labels, scheduler in self._replicas():
            named = dict(zip(_BY_REPLICA, labels, strict=True))
            for quantile, microseconds in zip(("0.5", "0.99"), scheduler.gpu_idle_us, strict=True):
                idle.add_sample(idle.name, named | {"quantile": quantile}, microseconds / 1e6)
            if scheduler.step_tokens:
                steps.add_metric(labels, *_summed(scheduler.step_tokens))
        yield from (idle, steps, self._cache())

    def _cache(self) -> Metric:
        """Return the cache configuration like vLLM: as the labels of a gauge with value 1."""
        fields = ["cache_dtype", "enable_prefix_caching", "gpu_memory_utilization"]
        names = ["model_name", *fields, "replica", "block_size", "num_gpu_blocks"]
        family = GaugeMetricFamily("penstock:cache_config_info", "Of the KV cache.", labels=names)
        for config, model in self._models:
            caching = str(config.enable_prefix_caching)
            given = (config.kv_cache_dtype, caching, str(config.gpu_memory_utilization))
            for scheduler in model.schedulers:
                own = (scheduler.replica, scheduler.block_size, scheduler.num_blocks)
                family.add_metric([config.model_name, *given, *map(str, own)], 1)
        return family


def _of_requests(models: list[tuple[str, Metrics]]) -> Iterator[Metric]:
    for name, text in _COUNTERS.items():
        values = [
            (model, getattr(counts, _OTHER_NAMES.get(name, name))) for model, counts in models
        ]
        yield _family(CounterMetricFamily, name, text, values)
    for name, text in _HISTOGRAMS.items():
        field = _OTHER_NAMES.get(name, name)
        sums = [(model, *_summed(getattr(counts, field))) for model, counts in models]
        yield _family(HistogramMetricFamily, name, text, sums)
    for name, label in (("request_success", "finished_reason"), ("request_failed", "code")):
        labels = ["model_name", label]
        family = CounterMetricFamily(f"penstock:{name}", f"Requests by {label}.", labels=labels)
        for model, counts in models:
            for value, number in getattr(counts, name).items():
                family.add_metric([model, value], number)
        yield family


def _family(kind: type[Family], name: str, text: str, values: Sequence[tuple[Any, ...]]) -> Metric:
    """Return a metric family. values: labels and value of each model's metric."""
    family = kind(f"penstock:{name}", text, labels=["model_name"])
    for model, *value in values:
        family.add_metric([model], *value)
    return family


def _summed(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """Return cumulative buckets, and the sum of the values."""
    bounds = [*map(str, histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True)), histogram.sum


def _of_processes(processes: list[ProcessStatus]) -> Iterator[Metric]:
    families: dict[str, Metric] = {}
    for process in processes:
        values = {
            "cpu_seconds_total": process.cpu_seconds,
            "resident_memory_bytes": process.rss_bytes,
            "restarts_total": process.restarts,
            "uptime_seconds": process.uptime,
            **process.counters,
        }
        for name, value in values.items():
            if name not in families:
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                text = f"Of each process: {name.replace('_', ' ')}."
                families[name] = kind(f"penstock:process_{name}", text, labels=["process"])
            families[name].add_metric([process.name], value)  # type: ignore[attr-defined]
    yield from families.values()


def render(status: StatusReply, config: Config) -> bytes:
    """Return the status in the text format of Prometheus."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(status, config))
    return generate_latest(registry)


async def status(models: Models, _: Texts) -> Response:
    """Describe the pipeline and its processes."""
    return json_response(await status_of(models.client, metrics=True))


async def metrics(models: Models, _: Texts) -> Response:
    """Return metrics for Prometheus."""
    status = await status_of(models.client, metrics=True)
    return Response(render(status, models.config), media_type="text/plain; version=0.0.4")


async def health(models: Models, _: Texts) -> Response:
    """Return 200 if the pipeline works."""
    await _health(models).check()
    return json_response({"status": "ok"})


async def ready(models: Models, _: Texts) -> Response:
    """Return 200 if every stage is there."""
    await _health(models).check_ready()
    return json_response({"status": "ok"})


def _health(models: Models) -> HealthCheck:
    return models.singletons.get(HealthCheck, models.client, models.config.step_timeout)


async def show_version(_: Models, __: Texts) -> Response:
    """Return Penstock's version."""
    return json_response({"version": version(DISTRIBUTION)})


OPERATIONS = [
    Operation("GET", "/status", status, StatusReply),
    Operation("GET", "/metrics", metrics, None, media_type="text/plain"),
    Operation("GET", "/health", health, Texts, is_open=True),
    Operation("GET", "/ping", health, Texts, is_open=True),
    Operation("POST", "/ping", health, Texts, is_open=True),
    Operation("GET", "/ready", ready, Texts, is_open=True),
    Operation("GET", "/version", show_version, Texts, is_open=True),
]
