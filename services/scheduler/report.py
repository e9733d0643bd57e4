"""How the scheduler is, for the gateway and for metrics."""

from time import monotonic

from penstock.protocol.status import SchedulerStatus
from penstock.services.scheduler.scheduler import Scheduler


def fill(status: SchedulerStatus, scheduler: Scheduler) -> None:
    """Queues, blocks and steps."""
    status.num_waiting = len(scheduler.waiting)
    status.num_running = len(scheduler.running)
    status.num_blocks = scheduler.block_manager.pool.num_blocks
    status.num_free_blocks = scheduler.block_manager.num_free_blocks
    status.num_steps = scheduler.num_steps
    status.num_preemptions = scheduler.num_preemptions


def queue_age(scheduler: Scheduler | None) -> float:
    """Seconds since the head of the queue came; 0 if nothing waits."""
    waiting = scheduler.waiting if scheduler else ()
    return monotonic() - waiting[0].arrived_at if waiting else 0.0
