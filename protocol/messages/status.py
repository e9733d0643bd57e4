"""The status of the pipeline, as scheduler, supervisor and gateway report it."""

from functools import reduce
from operator import add
from typing import Annotated

from msgspec import Meta, Struct

from penstock.protocol.messages.histogram import Histogram
from penstock.protocol.messages.metrics import Metrics


class ProcessStatus(Struct, kw_only=True, omit_defaults=True):
    """One process, as the supervisor sees it."""

    name: str  # `detokenizer.2`
    pid: int
    node: str = ""  # name of its machine; empty where there is only one
    uptime: float  # seconds
    restarts: int
    cpu_seconds: float = 0.0  # user and system, since its start
    rss_bytes: int = 0
    # metrics of the process since its start, by name without `penstock_process_`
    counters: dict[str, float] = {}


class SchedulerStatus(Struct, kw_only=True, tag="scheduler_status"):
    """The scheduler's state, sent to the gateway when it starts, on change, and as heartbeat."""

    epoch: int  # epoch of this scheduler; a later scheduler has a larger one
    ready: bool  # True with all workers and at least one detokenizer
    first_attempt: int = 0  # first attempt of the newest gateway that it knows, which it serves
    # requests of an earlier gateway with a lease, which no client has claimed yet
    unclaimed: list[str] = []
    replica: Annotated[int, Meta(ge=0)] = 0
    workers_ready: bool = False  # plans can be run, whether or not there is a detokenizer
    # plans may be run soon: the scheduler has restarted, and may adopt earlier workers
    awaits_workers: bool = False
    # while no plan can be run: deaths of workers by request that was in flight at them
    num_deaths: dict[str, int] = {}
    num_waiting: int = 0
    num_running: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0  # whose KV was computed again, after a preemption or a death
    num_offload_hits: int = 0  # tokens whose KV was copied back from the host tier
    num_offloaded_blocks: int = 0  # KV blocks in the host tier
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
        """Two replicas as if they were one."""
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

    name: str = ""  # by which requests choose it
    model: str  # its folder
    ready: bool  # every stage is there, in every replica
    tokenizers: dict[str, int]  # name → requests it has
    schedulers: list[SchedulerStatus]  # those that have reported, by replica
    num_requests: int  # requests in the ledger: accepted and not yet answered
    metrics: Metrics | None = None  # if requested

    @property
    def scheduler(self) -> SchedulerStatus | None:
        """All replicas as if they were one; None if none has reported."""
        return reduce(add, self.schedulers) if self.schedulers else None

    @property
    def serves(self) -> bool:
        """Requests are worked at, if not by every replica."""
        return bool(self.tokenizers) and any(one.ready for one in self.schedulers)


class StatusReply(ModelStatus, kw_only=True, tag="status_reply"):
    """The pipeline as the gateway sees it. With several models it is the sum of them."""

    models: list[ModelStatus] = []  # each of several models
    num_bad_frames: int
    # no new request is accepted: the pipeline stops when the open ones are answered
    draining: bool = False
    # every process that a supervisor keeps running, this one too
    processes: list[ProcessStatus] = []

    @property
    def by_model(self) -> list[ModelStatus]:
        """Every model."""
        return self.models or [self]

    @property
    def all_serve(self) -> bool:
        """Requests to every model are worked at."""
        return all(one.serves for one in self.by_model)
