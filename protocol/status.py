"""How the pipeline is: what the scheduler, the supervisor and the gateway tell of it."""

from msgspec import Struct

from penstock.protocol.metrics import Metrics


class ProcessStatus(Struct, kw_only=True, omit_defaults=True):
    """One process, as the supervisor sees it."""

    name: str
    """`detokenizer.2`"""
    pid: int
    uptime: float
    """seconds"""
    restarts: int
    cpu_seconds: float = 0.0
    """user and system, since its start"""
    rss_bytes: int = 0
    counters: dict[str, float] = {}
    """what it counts about itself since its start, by the name of a metric without `penstock_`"""


class SchedulerStatus(Struct, kw_only=True, tag="scheduler_status"):
    """The scheduler's state, sent to the gateway when it starts, on change, and as heartbeat."""

    epoch: int
    """nanoseconds since 1970 at which this scheduler started; a later one is larger"""
    ready: bool
    """all workers are in place and so is a detokenizer"""
    num_waiting: int = 0
    num_running: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    gpu_idle_us: tuple[float, float] = (0.0, 0.0)
    """median and 99th percentile of the GPU's wait between two steps; 0 on CPUs"""
    num_bad_frames: int = 0
    workers: list[str] = []
    detokenizers: dict[str, int] = {}
    """name → requests it has"""


class StatusReply(Struct, kw_only=True, tag="status_reply"):
    """The pipeline as the gateway sees it."""

    ready: bool
    model: str
    num_requests: int
    """requests in the ledger: accepted and not yet answered"""
    tokenizers: dict[str, int]
    """name → requests it has"""
    scheduler: SchedulerStatus | None
    num_bad_frames: int
    processes: list[ProcessStatus] = []
    """every process that a supervisor keeps running, this one too"""
    metrics: Metrics | None = None
    """if they were asked for"""
