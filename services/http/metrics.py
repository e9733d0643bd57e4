"""`/metrics`: the pipeline in Prometheus's text format, with vLLM's names for the same values.

The gateway counts, so all http processes answer the same: scrape one of them.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from penstock.protocol.config import Config
from penstock.protocol.messages.status import (
    Histogram,
    Metrics,
    ModelStatus,
    ProcessStatus,
    SchedulerStatus,
    StatusReply,
)

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
# metric → the field that it has, if that has another name
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
    "kv_offload_blocks": (GaugeMetricFamily, "num_offloaded_blocks", "Blocks in the host tier."),
    "num_steps": (CounterMetricFamily, "num_steps", "Steps of the model."),
}
_BY_REPLICA = ["model_name", "replica"]


class StatusCollector:
    """One status of the pipeline, for a registry of prometheus_client."""

    def __init__(self, status: StatusReply, config: Config) -> None:
        self._status = status
        self._models = list(zip(config.by_model(), status.by_model, strict=True))

    def collect(self) -> Iterator[Metric]:
        ready = [(name, one.ready) for name, one in self._named()]
        yield _family(GaugeMetricFamily, "ready", "1 if every stage is there.", ready)
        number = [(name, one.num_requests) for name, one in self._named()]
        yield _family(GaugeMetricFamily, "num_requests_open", "Unanswered requests.", number)
        bad = [(self._models[0][0].model_name, self._status.num_bad_frames)]
        yield _family(CounterMetricFamily, "bad_frames", "Undecodable frames.", bad)
        if self._status.schedulers:
            yield from self._of_schedulers()
        if counted := [(name, one.metrics) for name, one in self._named() if one.metrics]:
            yield from _of_requests(counted)
        yield from _of_processes(self._status.processes)

    def _named(self) -> Iterator[tuple[str, ModelStatus]]:
        return ((config.model_name, one) for config, one in self._models)

    def _replicas(self) -> Iterator[tuple[list[str], SchedulerStatus]]:
        """Yield each replica of each model, with its labels."""
        for name, model in self._named():
            for one in model.schedulers:
                yield [name, str(one.replica)], one

    def _of_schedulers(self) -> Iterator[Metric]:
        for name, (kind, field, text) in _OF_SCHEDULER.items():
            family = kind(f"penstock:{name}", text, labels=_BY_REPLICA)
            for labels, one in self._replicas():
                family.add_metric(labels, getattr(one, field))
            yield family
        name = "penstock:gpu_idle_seconds"
        idle = Metric(name, "The GPU's wait between two recent steps.", "summary")
        name = "penstock:iteration_tokens_total"
        steps = HistogramMetricFamily(name, "Tokens that a step computes.", labels=_BY_REPLICA)
        for labels, one in self._replicas():
            named = dict(zip(_BY_REPLICA, labels, strict=True))
            for quantile, microseconds in zip(("0.5", "0.99"), one.gpu_idle_us, strict=True):
                idle.add_sample(idle.name, named | {"quantile": quantile}, microseconds / 1e6)
            if one.step_tokens:
                steps.add_metric(labels, *_summed(one.step_tokens))
        yield from (idle, steps, self._cache())

    def _cache(self) -> Metric:
        """Return the configuration as vLLM does: labels of a gauge that is 1."""
        fields = ["cache_dtype", "enable_prefix_caching", "gpu_memory_utilization"]
        names = ["model_name", *fields, "replica", "block_size", "num_gpu_blocks"]
        family = GaugeMetricFamily("penstock:cache_config_info", "Of the KV cache.", labels=names)
        for config, model in self._models:
            caching = str(config.enable_prefix_caching)
            given = (config.kv_cache_dtype, caching, str(config.gpu_memory_utilization))
            for one in model.schedulers:
                values = (str(one.replica), str(one.block_size), str(one.num_blocks))
                family.add_metric([config.model_name, *given, *values], 1)
        return family


def _of_requests(models: list[tuple[str, Metrics]]) -> Iterator[Metric]:
    for name, text in _COUNTERS.items():
        values = [(model, getattr(one, _OTHER_NAMES.get(name, name))) for model, one in models]
        yield _family(CounterMetricFamily, name, text, values)
    for name, text in _HISTOGRAMS.items():
        field = _OTHER_NAMES.get(name, name)
        sums = [(model, *_summed(getattr(one, field))) for model, one in models]
        yield _family(HistogramMetricFamily, name, text, sums)
    for name, label in (("request_success", "finished_reason"), ("request_failed", "code")):
        labels = ["model_name", label]
        family = CounterMetricFamily(f"penstock:{name}", f"Requests by {label}.", labels=labels)
        for model, one in models:
            for value, number in getattr(one, name).items():
                family.add_metric([model, value], number)
        yield family


def _family(kind: type[Family], name: str, text: str, values: Sequence[tuple[Any, ...]]) -> Metric:
    """Return a family; values: a model's name and what its metric has."""
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
    """Return the text that Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(status, config))
    return generate_latest(registry)
