"""Reports of the scheduler: its status for the gateway, metrics, and traces of requests."""

from time import monotonic

from penstock.protocol.messages.status import SchedulerStatus
from penstock.protocol.tracing import Tracer
from penstock.services.scheduler.in_flight_plan import InFlightPlan, StepOutput
from penstock.services.scheduler.scheduler import Scheduler
from penstock.services.scheduler.sequence import Sequence
from penstock.services.scheduler.streams import Streams
from penstock.services.scheduler.workers import WorkerGroup


def fill_status(
    status: SchedulerStatus, scheduler: Scheduler | None, group: WorkerGroup, streams: Streams
) -> None:
    """Fill in workers and detokenizers; once there are workers, queues, blocks and steps."""
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
    """Return metrics: the age of the queue's head is in seconds, 0 if nothing waits."""
    head = next(iter(scheduler.waiting), None) if scheduler else None
    age = monotonic() - head.arrived_at if head else 0.0
    drafts = scheduler.proposer.counters() if scheduler else {}
    return {"plan_bytes_total": plan_bytes, "queue_age_seconds": age, **drafts}


class Traces:
    """The spans `queue`, `prefill` and `decode` of each sequence, if tracing is on.

    A sequence that is preempted, or whose workers die, stays in the span it is in.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._spans: dict[Sequence, tuple[str, float]] = {}
        """current span, and its begin"""

    def on_arrival(self, sequence: Sequence) -> None:
        if self._tracer.is_on:
            self._spans[sequence] = "queue", monotonic()

    def on_plan(self, plan: InFlightPlan) -> None:
        if self._tracer.is_on:
            for sequence in plan.sequences:
                self._advance(sequence, "queue", "prefill")

    def on_output(self, output: StepOutput) -> None:
        if self._tracer.is_on:
            for sequence in output.sequences:
                self._advance(sequence, "prefill", "decode")
            for sequence in output.finished:
                self.end(sequence)

    def end(self, sequence: Sequence) -> None:
        """End the span of a sequence, if it has one."""
        if span := self._spans.pop(sequence, None):
            name, begin = span
            attributes = {"gen_ai.usage.output_tokens": len(sequence.output_token_ids)}
            self._tracer.span(name, sequence.request_id, begin, attributes)

    def _advance(self, sequence: Sequence, from_: str, to: str) -> None:
        if self._spans.get(sequence, ("",))[0] == from_:
            self.end(sequence)
            self._spans[sequence] = to, monotonic()
