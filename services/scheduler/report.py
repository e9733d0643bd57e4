"""Reports of the scheduler: its status for the gateway, metrics, and traces of requests."""

from time import monotonic

from penstock.protocol.messages.status import SchedulerStatus
from penstock.protocol.tracing import Tracer
from penstock.protocol.transport.channel import traffic
from penstock.services.scheduler.peers.streams import Streams
from penstock.services.scheduler.peers.worker_recovery import RecoverableScheduler
from penstock.services.scheduler.peers.workers import WorkerGroup
from penstock.services.scheduler.planning.scheduler import Scheduler
from penstock.services.scheduler.sequences.sequence import Sequence


def fill_status(
    status: SchedulerStatus,
    scheduler: RecoverableScheduler | None,
    group: WorkerGroup,
    streams: Streams,
) -> None:
    """Fill in this process's peers; once there are workers, queues, blocks and steps."""
    status.detokenizers = {peer.name: len(peer.work) for peer in streams.detokenizers}
    status.workers = group.names
    status.num_bad_frames = traffic.bad_frames
    status.workers_ready, status.awaits_workers = group.ready, group.is_awaited
    if scheduler is None:
        return
    status.gpu_idle_us = group.idle_us
    if not group.ready:
        open_ones = [*scheduler.waiting, *scheduler.grammars.waiting, *scheduler.running]
        status.num_deaths = {one.request_id: one.num_deaths for one in open_ones if one.num_deaths}
    status.num_waiting = scheduler.num_waiting
    status.num_running = len(scheduler.running)
    status.num_blocks = scheduler.block_manager.pool.num_blocks
    status.num_free_blocks = scheduler.block_manager.pool.num_free_blocks
    status.num_steps = scheduler.num_steps
    status.num_preemptions = scheduler.num_preemptions
    status.num_recomputed_tokens = scheduler.num_recomputed_tokens
    if offload := scheduler.offload:
        status.num_offloaded_blocks = offload.num_blocks
        status.num_offload_hits = offload.num_loaded * scheduler.block_manager.block_size
    status.block_size = scheduler.block_manager.block_size
    status.step_tokens = scheduler.step_tokens


def counters(scheduler: Scheduler | None, plan_bytes: int) -> dict[str, float]:
    """Return metrics: the age of the queue's head is in seconds, 0 if nothing waits."""
    head = next(iter(scheduler.waiting), None) if scheduler else None
    age = monotonic() - head.arrived_at if head else 0.0
    drafts = scheduler.draft_scheduler.counters() if scheduler else {}
    return {"plan_bytes_total": plan_bytes, "queue_age_seconds": age, **drafts}


def write_spans(tracer: Tracer, sequence: Sequence) -> None:
    """Report the spans `queue`, `prefill` and `decode` of a sequence that is released.

    A sequence that is preempted, or whose workers die, stays in the span it is in.
    """
    moments = {
        "queue": sequence.arrived_at,
        "prefill": sequence.scheduled_at,
        "decode": sequence.first_token_at,
    }
    attributes = {"gen_ai.usage.output_tokens": len(sequence.output_token_ids)}
    begun = [(name, begin) for name, begin in moments.items() if begin]
    ends = [begin for _, begin in begun[1:]]
    for (name, begin), end in zip(begun, [*ends, monotonic()], strict=True):
        tracer.span(name, sequence.request_id, begin, attributes, end=end)
