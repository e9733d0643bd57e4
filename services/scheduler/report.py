"""How the scheduler is, for the gateway and for metrics."""

from time import monotonic

from penstock.protocol.messages.status import SchedulerStatus
from penstock.services.scheduler.scheduler import Scheduler
from penstock.services.scheduler.streams import Streams
from penstock.services.scheduler.workers import WorkerGroup


def fill(
    status: SchedulerStatus, scheduler: Scheduler | None, group: WorkerGroup, streams: Streams
) -> None:
    """Workers and detokenizers; where there have been workers, queues, blocks and steps."""
    status.detokenizers = {peer.name: len(peer.work) for peer in streams.detokenizers}
    status.workers = group.names
    status.workers_ready = group.ready
    if scheduler is None:
        return
    status.gpu_idle_us = group.idle_us
    if not group.ready:
        waiting = scheduler.waiting
        status.num_deaths = {one.request_id: one.num_deaths for one in waiting if one.num_deaths}
    status.num_waiting = len(scheduler.waiting)
    status.num_running = len(scheduler.running)
    status.num_blocks = scheduler.block_manager.pool.num_blocks
    status.num_free_blocks = scheduler.block_manager.num_free_blocks
    status.num_steps = scheduler.num_steps
    status.num_preemptions = scheduler.num_preemptions
    status.block_size = scheduler.block_manager.block_size
    status.step_tokens = scheduler.step_tokens


def counters(scheduler: Scheduler | None, plan_bytes: int) -> dict[str, float]:
    """Return metrics; the age of the queue's head in seconds, 0 if nothing waits."""
    head = next(iter(scheduler.waiting), None) if scheduler else None
    age = monotonic() - head.arrived_at if head else 0.0
    drafts = scheduler.drafter.counters() if scheduler else {}
    return {"plan_bytes_total": plan_bytes, "queue_age_seconds": age, **drafts}
