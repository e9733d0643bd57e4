"""The status of the pipeline, as scheduler, supervisor and gateway report it, with its metrics.

Metrics have vLLM's names if they have the same meaning.
"""

from bisect import bisect_left
from functools import reduce
from operator import add
from typing import Annotated

from msgspec import Meta, Struct


class Histogram(Struct, kw_only=True):
    """Counts of values up to each bound, as in Prometheus."""

    bounds: list[float]  # ascending; seconds or tokens
    # [len(bounds) + 1]: number of values in each interval, not summed; the last: beyond all bounds
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def of(cls, bounds: list[float]) -> "Histogram":
        return cls(bounds=bounds, counts=[0] * (len(bounds) + 1))

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


# bounds of the tokens of a step: 1, 8, 16, 32, … 8,192
ITERATION_TOKENS = [1.0, *(float(1 << bits) for bits in range(3, 14))]


# Bounds of histograms in seconds, as in vLLM (vllm/v1/metrics/loggers.py, commit 005a810bc40f).
# INTER_TOKEN has finer bounds before vLLM's first, which is longer than a step of a small model.
# fmt: off
FIRST_TOKEN = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
]
INTER_TOKEN = [
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
    0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
]
END_TO_END = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0, 7680.0,
]
# fmt: on
NUM_ANSWERS = [1.0, 2.0, 5.0, 10.0, 20.0]


def token_bounds(largest: int) -> list[float]:
    """Return 1, 2, 5, 10, 20, … up to `largest`."""
    exponents = range(len(str(largest)))
    return [float(m * 10**e) for e in exponents for m in (1, 2, 5) if m * 10**e <= largest]


class RequestTimes(Struct, kw_only=True):
    """Durations of the parts of one request, seconds."""

    queue: float  # from the request's arrival at the scheduler to its first step
    prefill: float  # from its first step to its first token, at the scheduler
    decode: float  # from its first token to its last, at the gateway
    first_token: float  # from its arrival at the gateway to its first token there


class Metrics(Struct, kw_only=True):
    """Counters and histograms since the start of this gateway."""

    request_success: dict[str, int] = {}  # finish reason → answered requests
    request_failed: dict[str, int] = {}  # code of the error → refused or failed requests
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_hits: int = 0  # prompt tokens that were found in the prefix cache
    time_to_first_token_seconds: Histogram
    inter_token_latency_seconds: Histogram
    e2e_request_latency_seconds: Histogram
    request_queue_time_seconds: Histogram
    request_prefill_time_seconds: Histogram
    request_decode_time_seconds: Histogram
    request_inference_time_seconds: Histogram
    request_time_per_output_token_seconds: Histogram
    request_prompt_tokens: Histogram
    request_generation_tokens: Histogram
    request_params_max_tokens: Histogram
    request_params_n: Histogram

    @classmethod
    def empty(cls, max_model_len: int) -> "Metrics":
        tokens = token_bounds(max_model_len)
        return cls(
            time_to_first_token_seconds=Histogram.of(FIRST_TOKEN),
            inter_token_latency_seconds=Histogram.of(INTER_TOKEN),
            e2e_request_latency_seconds=Histogram.of(END_TO_END),
            request_queue_time_seconds=Histogram.of(END_TO_END),
            request_prefill_time_seconds=Histogram.of(END_TO_END),
            request_decode_time_seconds=Histogram.of(END_TO_END),
            request_inference_time_seconds=Histogram.of(END_TO_END),
            request_time_per_output_token_seconds=Histogram.of(INTER_TOKEN),
            request_prompt_tokens=Histogram.of(tokens),
            request_generation_tokens=Histogram.of(tokens),
            request_params_max_tokens=Histogram.of(tokens),
            request_params_n=Histogram.of(NUM_ANSWERS),
        )

    def count_failure(self, code: str) -> None:
        """Count a refused or failed request of any kind."""
        self.request_failed[code] = self.request_failed.get(code, 0) + 1


class ProcessStatus(Struct, kw_only=True, omit_defaults=True):
    """One process, as the supervisor sees it."""

    name: str  # `detokenizer.2`
    pid: int
    node: str = ""  # name of the process's machine; empty without a cluster
    uptime: float  # seconds
    restarts: int
    cpu_seconds: float = 0.0  # user and system, since its start
    rss_bytes: int = 0
    # metrics of the process since its start, by name without `penstock:process_`
    counters: dict[str, float] = {}


class SchedulerStatus(Struct, kw_only=True, tag="scheduler_status"):
    """The scheduler's state, sent to the gateway when it starts, on change, and as heartbeat."""

    epoch: int  # epoch of this scheduler; a later scheduler has a larger epoch
    ready: bool  # True if all workers and at least one detokenizer are available
    first_attempt: int = 0  # first attempt of the newest known gateway, which is served
    # requests of an earlier gateway that have a lease, and that no client has claimed yet
    unclaimed: list[str] = []
    replica: Annotated[int, Meta(ge=0)] = 0
    workers_ready: bool = False  # True if plans can be run, even without a detokenizer
    # plans may be run soon: the scheduler has restarted, and may adopt earlier workers
    awaits_workers: bool = False
    # while no plan can be run: request → deaths of workers at which the request was in flight
    num_deaths: dict[str, int] = {}
    num_waiting: int = 0
    num_running: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0  # tokens computed again after a preemption or failure
    num_offload_hits: int = 0  # tokens whose KV was copied back from the host tier
    num_offloaded_blocks: int = 0  # host slots in use, of KV blocks and pieces of state blocks
    num_files: int = 0  # files of the folder tier that a rank has
    num_unsaved_blocks: int = 0  # blocks, slots and files that are to be written to the folder tier
    block_size: int = 0  # tokens per KV block; 0: not known yet
    step_tokens: Histogram | None = None  # tokens of each step that computed any
    # median and 99th percentile of the GPU's wait between two steps; 0 on CPUs
    gpu_idle_us: tuple[float, float] = (0.0, 0.0)
    num_bad_frames: int = 0
    workers: list[str] = []
    detokenizers: dict[str, int] = {}  # name → requests it has

    @property
    def kv_usage(self) -> float:
        return 1 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0

    def __add__(self, other: "SchedulerStatus") -> "SchedulerStatus":
        """Merge the status of two replicas."""
        return SchedulerStatus(
            epoch=max(self.epoch, other.epoch),
            ready=self.ready and other.ready,
            workers_ready=self.workers_ready and other.workers_ready,
            gpu_idle_us=max(self.gpu_idle_us, other.gpu_idle_us),
            block_size=max(self.block_size, other.block_size),
            workers=self.workers + other.workers,
            detokenizers={
                name: self.detokenizers.get(name, 0) + other.detokenizers.get(name, 0)
                for name in {**self.detokenizers, **other.detokenizers}
            },
            **{name: getattr(self, name) + getattr(other, name) for name in _SUMS},
        )


_SUMS = [name for name in SchedulerStatus.__struct_fields__ if name.startswith("num_")]
_SUMS.remove("num_deaths")


class ModelStatus(Struct, kw_only=True):
    """One model as the gateway sees it."""

    name: str = ""  # name by which requests choose the model
    model: str  # folder of the model
    ready: bool  # True if every stage of every replica is ready
    tokenizers: dict[str, int]  # name → requests it has
    schedulers: list[SchedulerStatus]  # status of the replicas that have reported, by replica
    num_requests: int  # requests in the ledger: accepted and not answered yet
    metrics: Metrics | None = None  # if requested

    @property
    def scheduler(self) -> SchedulerStatus | None:
        """The merged status of all replicas; None if no replica has reported."""
        return reduce(add, self.schedulers) if self.schedulers else None

    @property
    def serves(self) -> bool:
        """True if at least one replica works at requests."""
        return bool(self.tokenizers) and any(scheduler.ready for scheduler in self.schedulers)


class StatusReply(ModelStatus, kw_only=True, tag="status_reply"):
    """The pipeline as the gateway sees it, with the fields of `ModelStatus`.

    With several models the fields are sums over all models; `name` and `model` are the first
    model's.
    """

    models: list[ModelStatus] = []  # each of several models
    num_bad_frames: int
    # no new request is accepted: the pipeline stops when open requests are answered
    draining: bool = False
    # every process that a supervisor keeps running, the gateway included
    processes: list[ProcessStatus] = []

    @property
    def by_model(self) -> list[ModelStatus]:
        """Return the status of each model."""
        return self.models or [self]

    @property
    def all_serve(self) -> bool:
        """True if every model works at requests."""
        return all(model.serves for model in self.by_model)
