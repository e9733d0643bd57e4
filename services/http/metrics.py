"""`/metrics`: the pipeline in Prometheus's text format, with vLLM's names for the same values.

The gateway counts, so all http processes answer the same: scrape one of them.
"""

from collections.abc import Iterator
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
from penstock.protocol.messages.histogram import Histogram
from penstock.protocol.messages.metrics import Metrics
from penstock.protocol.messages.status import ProcessStatus, SchedulerStatus, StatusReply

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
_OTHER_NAMES = {"time_per_output_token_seconds": "inter_token_latency_seconds"}
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
    "num_steps": (CounterMetricFamily, "num_steps", "Steps of the model."),
}
_BY_REPLICA = ["model_name", "replica"]


class StatusCollector:
    """One status of the pipeline, for a registry of prometheus_client."""

    def __init__(self, status: StatusReply, model: str, config: Config) -> None:
        self._status = status
        self._model = model
        self._config = config

    def collect(self) -> Iterator[Metric]:
        status = self._status
        for kind, name, text, value in (
            (GaugeMetricFamily, "ready", "1 if every stage is there.", status.ready),
            (GaugeMetricFamily, "num_requests_open", "Unanswered requests.", status.num_requests),
            (CounterMetricFamily, "bad_frames", "Undecodable frames.", status.num_bad_frames),
        ):
            yield self._family(kind, name, text, value)
        if status.schedulers:
            yield from self._of_schedulers(status.schedulers)
        if status.metrics:
            yield from self._of_requests(status.metrics)
        yield from _of_processes(status.processes)

    def _of_schedulers(self, schedulers: list[SchedulerStatus]) -> Iterator[Metric]:
        for name, (kind, field, text) in _OF_SCHEDULER.items():
            family = kind(f"penstock:{name}", text, labels=_BY_REPLICA)
            for one in schedulers:
                family.add_metric([self._model, str(one.replica)], getattr(one, field))
            yield family
        name = "penstock:gpu_idle_seconds"
        idle = Metric(name, "The GPU's wait between two recent steps.", "summary")
        name = "penstock:iteration_tokens_total"
        steps = HistogramMetricFamily(name, "Tokens that a step computes.", labels=_BY_REPLICA)
        for one in schedulers:
            labels = {"model_name": self._model, "replica": str(one.replica)}
            for quantile, microseconds in zip(("0.5", "0.99"), one.gpu_idle_us, strict=True):
                idle.add_sample(idle.name, labels | {"quantile": quantile}, microseconds / 1e6)
            if one.step_tokens:
                steps.add_metric(list(labels.values()), *_summed(one.step_tokens))
        yield from (idle, steps, self._cache(schedulers))

    def _cache(self, schedulers: list[SchedulerStatus]) -> Metric:
        """Return the configuration as vLLM does: labels of a gauge that is 1."""
        config = self._config
        given = {
            "model_name": self._model,
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "gpu_memory_utilization": str(config.gpu_memory_utilization),
        }
        names = [*given, "replica", "block_size", "num_gpu_blocks"]
        family = GaugeMetricFamily("penstock:cache_config_info", "Of the KV cache.", labels=names)
        for one in schedulers:
            values = (str(one.replica), str(one.block_size), str(one.num_blocks))
            family.add_metric([*given.values(), *values], 1)
        return family

    def _of_requests(self, metrics: Metrics) -> Iterator[Metric]:
        for name, text in _COUNTERS.items():
            yield self._family(CounterMetricFamily, name, text, getattr(metrics, name))
        for name, text in _HISTOGRAMS.items():
            histogram = getattr(metrics, _OTHER_NAMES.get(name, name))
            yield self._family(HistogramMetricFamily, name, text, *_summed(histogram))
        for name, label, values in (
            ("request_success", "finished_reason", metrics.request_success),
            ("request_failed", "code", metrics.request_failed),
        ):
            labels = ["model_name", label]
            family = CounterMetricFamily(f"penstock:{name}", f"Requests by {label}.", labels=labels)
            for value, number in values.items():
                family.add_metric([self._model, value], number)
            yield family

    def _family(self, kind: type[Family], name: str, text: str, *value: Any) -> Metric:
        family = kind(f"penstock:{name}", text, labels=["model_name"])
        family.add_metric([self._model], *value)
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


def render(status: StatusReply, model: str, config: Config) -> bytes:
    """Return the text that Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(status, model, config))
    return generate_latest(registry)
