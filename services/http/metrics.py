"""`/metrics`: the pipeline in Prometheus's text format, with vLLM's names where they mean the same.

Every process of kind http answers the same, since the gateway counts: scrape one of them.
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
from penstock.protocol.messages.metrics import Histogram, Metrics
from penstock.protocol.messages.status import ProcessStatus, SchedulerStatus, StatusReply

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
_HISTOGRAMS = {
    "time_to_first_token_seconds": "From a request's arrival to its first token.",
    "inter_token_latency_seconds": "Between two tokens of a request.",
    "e2e_request_latency_seconds": "From a request's arrival to its answer.",
    "request_queue_time_seconds": "In the scheduler's queue.",
    "request_prefill_time_seconds": "From the first step that had a request to its first token.",
    "request_decode_time_seconds": "From a request's first token to its last.",
    "request_inference_time_seconds": "Prefill and decode of a request.",
    "request_time_per_output_token_seconds": "Decode time per token after the first, by request.",
    "request_prompt_tokens": "Tokens of prompts.",
    "request_generation_tokens": "Tokens of answers.",
    "request_params_max_tokens": "What requests gave as max_tokens.",
    "request_params_n": "What requests gave as n.",
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of answered requests.",
    "generation_tokens": "Generated tokens.",
    "prefix_cache_queries": "Prompt tokens that were looked for in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
}
_OF_SCHEDULER = {
    "num_requests_running": ("num_running", "In the batch."),
    "num_requests_waiting": ("num_waiting", "Not in it yet."),
    "kv_cache_usage_perc": ("kv_usage", "Share of KV blocks in use; 1 is all."),
    "num_preemptions": ("num_preemptions", "Sequences put back."),
    "num_steps": ("num_steps", "Steps of the model."),
}
_COUNTERS_OF_SCHEDULER = ("num_preemptions", "num_steps")


class StatusCollector:
    """One status of the pipeline, for a registry of prometheus_client."""

    def __init__(self, status: StatusReply, model: str, config: Config) -> None:
        self._status = status
        self._model = model
        self._config = config

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        status = self._status
        yield self._family(
            GaugeMetricFamily, "ready", "Whether every stage is there.", status.ready
        )
        yield self._family(
            GaugeMetricFamily, "num_requests_open", "Accepted, not answered.", status.num_requests
        )
        yield self._family(
            CounterMetricFamily, "bad_frames", "Undecodable frames.", status.num_bad_frames
        )
        if status.schedulers:
            yield from self._of_schedulers(status.schedulers)
        if status.metrics:
            yield from self._of_requests(status.metrics)
        yield from _of_processes(status.processes)

    def _of_schedulers(self, schedulers: list[SchedulerStatus]) -> Iterator[Metric]:
        for name, (field, text) in _OF_SCHEDULER.items():
            kind = CounterMetricFamily if name in _COUNTERS_OF_SCHEDULER else GaugeMetricFamily
            family = kind(f"penstock:{name}", text, labels=["model_name", "replica"])
            for one in schedulers:
                family.add_metric([self._model, str(one.replica)], getattr(one, field))
            yield family
        name = "penstock:gpu_idle_seconds"
        idle = Metric(name, "The GPU's wait between two steps, of the newest ones.", "summary")
        steps = HistogramMetricFamily(
            "penstock:iteration_tokens_total",
            "Tokens that a step computes.",
            labels=["model_name", "replica"],
        )
        for one in schedulers:
            labels = {"model_name": self._model, "replica": str(one.replica)}
            for quantile, microseconds in zip(("0.5", "0.99"), one.gpu_idle_us, strict=True):
                idle.add_sample(name, labels | {"quantile": quantile}, microseconds / 1e6)
            if one.step_tokens:
                steps.add_metric(list(labels.values()), *_summed(one.step_tokens))
        yield idle
        yield steps
        yield self._cache(schedulers)

    def _cache(self, schedulers: list[SchedulerStatus]) -> Metric:
        """vLLM's way to report a configuration: labels of a gauge that is 1."""
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
            yield self._family(HistogramMetricFamily, name, text, *_summed(getattr(metrics, name)))
        between = metrics.inter_token_latency_seconds
        text, older = (
            "As inter_token_latency_seconds, by vLLM's older name.",
            "time_per_output_token_seconds",
        )
        yield self._family(HistogramMetricFamily, older, text, *_summed(between))
        for name, label, values in (
            ("request_success", "finished_reason", metrics.request_success),
            ("request_failed", "code", metrics.request_failed),
        ):
            family = CounterMetricFamily(
                f"penstock:{name}", f"Requests by {label}.", labels=["model_name", label]
            )
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
