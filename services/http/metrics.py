"""`/metrics`: the pipeline in Prometheus's text format, with vLLM's names where they mean the same.

Every process of kind http answers the same, since the gateway counts: scrape one of them.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from penstock.protocol.metrics import Histogram, Metrics
from penstock.protocol.status import ProcessStatus, SchedulerStatus, StatusReply

_HISTOGRAMS = {
    "time_to_first_token_seconds": "From a request's arrival to its first token.",
    "inter_token_latency_seconds": "Between two tokens of a request.",
    "e2e_request_latency_seconds": "From a request's arrival to its answer.",
    "request_prompt_tokens": "Tokens of prompts.",
    "request_generation_tokens": "Tokens of answers.",
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
    """One look at the pipeline, for a registry of prometheus_client."""

    def __init__(self, status: StatusReply, model: str) -> None:
        self._status = status
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        status = self._status
        yield self._gauge("ready", "Whether every stage is there.", status.ready)
        yield self._gauge("num_requests_open", "Accepted, not answered.", status.num_requests)
        yield self._counter("bad_frames", "Frames that were no message.", status.num_bad_frames)
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
        idle = GaugeMetricFamily(
            "penstock:gpu_idle_seconds",
            "The GPU's wait between two steps.",
            labels=["model_name", "replica", "quantile"],
        )
        for one in schedulers:
            for quantile, microseconds in zip(("0.5", "0.99"), one.gpu_idle_us, strict=True):
                idle.add_metric([self._model, str(one.replica), quantile], microseconds / 1e6)
        yield idle

    def _of_requests(self, metrics: Metrics) -> Iterator[Metric]:
        for name, text in _COUNTERS.items():
            yield self._counter(name, text, getattr(metrics, name))
        for name, text in _HISTOGRAMS.items():
            yield self._histogram(name, text, getattr(metrics, name))
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

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"penstock:{name}", text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"penstock:{name}", text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(f"penstock:{name}", text, labels=["model_name"])
        buckets, total = [], 0
        for bound, count in zip([*histogram.bounds, "+Inf"], histogram.counts, strict=True):
            total += count
            buckets.append((str(bound), total))
        family.add_metric([self._model], buckets, histogram.sum)
        return family


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


def render(status: StatusReply, model: str) -> bytes:
    """The text that Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(status, model))
    return generate_latest(registry)
