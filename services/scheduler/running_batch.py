"""The sequences that wait and run: they come, leave, and continue after the death of workers."""

from bisect import insort
from collections import deque
from heapq import heappop, heappush
from operator import attrgetter

from penstock.protocol.config import Config
from penstock.protocol.messages.client import FinishReason
from penstock.services.scheduler.block_manager import BlockManager
from penstock.services.scheduler.in_flight_plan import InFlightPlan
from penstock.services.scheduler.poison import count_death
from penstock.services.scheduler.sequence import Sequence, Status
from penstock.services.scheduler.waiting_queue import WaitingQueue
from penstock.services.scheduler.workers import NO_GROUP

WAITING, RUNNING, DRAINING, FINISHED = Status


class RunningBatch:
    """Places of sequences: in the queue or in a slot, with blocks."""

    def __init__(self, config: Config, block_manager: BlockManager, epoch: int) -> None:
        self.epoch = epoch
        """of the plans; each group of workers has its own"""
        self.block_manager = block_manager
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        """by `Sequence.rank`: the last one is the first to be preempted"""
        self.in_flight: deque[InFlightPlan] = deque()
        self.num_steps = self.num_preemptions = 0
        self._max_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._free_slots = list(range(self._max_rows))
        self._removed: list[int] = []
        """slots that leave the persistent batch with the next plan"""
        self._returning: set[Sequence] = set()
        """running sequences that the workers do not have, since the death of earlier ones"""
        self._suspect: Sequence | None = None
        """the one admitted last, if any"""

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence in any state. Its tokens in flight are discarded."""
        if sequence.status is FINISHED:
            return
        if sequence.status is WAITING:
            self.waiting.remove(sequence)
        elif sequence.status is RUNNING:
            self.running.remove(sequence)
            self._leave_slot(sequence)
        self.block_manager.free(sequence)
        sequence.status = FINISHED
        sequence.finish_reason = reason

    def preempt(self, sequence: Sequence) -> None:
        """Take slot and blocks from a running sequence; the KV of its tokens is recomputed."""
        self.running.remove(sequence)
        self._leave_slot(sequence)
        self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        self._note_lost(sequence)
        self.block_manager.free(sequence)
        sequence.status = WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.put_back(sequence)

    def _note_lost(self, sequence: Sequence) -> None:
        num_planned = min(sequence.num_planned_tokens, len(sequence.token_ids))
        sequence.num_lost_tokens = max(sequence.num_lost_tokens, num_planned)

    def _leave_slot(self, sequence: Sequence) -> None:
        if sequence in self._returning:
            self._returning.remove(sequence)
        else:
            self._removed.append(sequence.slot)
        heappush(self._free_slots, sequence.slot)
        sequence.slot = -1

    def _take_block(self, sequence: Sequence) -> int | None:
        """Append a block to a table, preempting newer sequences; None if it was the newest."""
        while not self.block_manager.num_free_blocks:
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return None
        return self.block_manager.append(sequence)

    @property
    def _is_trial(self) -> bool:
        """True while a suspect runs that has not got a token yet: it runs alone."""
        one = self._suspect
        return one is not None and one.is_suspect and one.status in (RUNNING, DRAINING)

    def _must_wait(self, sequence: Sequence) -> bool:
        """Return whether a sequence is in flight still, or must wait for a trial or for its own."""
        if self.in_flight and sequence.last_step >= self.in_flight[0].number:
            return True
        if sequence.is_suspect and not self._is_trial:
            return bool(self.running) or any(plan.computes for plan in self.in_flight)
        return self._is_trial

    def lose_plans(self) -> list[Sequence]:
        """Forget the plans in flight: the workers died, and other ones may have their memory.

        Only what these plans wrote is uncertain. A sequence with confirmed positions keeps its
        blocks and continues there; others wait. Return the sequences that are given up, and ended,
        as poison requests.
        """
        plans = list(self.in_flight)
        self.in_flight.clear()
        in_flight = {sequence for plan in plans for sequence in plan.sequences}
        given_up = count_death(in_flight)
        for plan in plans:
            self.block_manager.pool.hide(block for block, _ in plan.published)
        draining = [sequence for sequence in in_flight if sequence.status is DRAINING]
        self._returning.update(self.running)  # the next workers have no rows
        for sequence in [one for one in reversed(self.running) if not _can_continue(one)]:
            self.preempt(sequence)
        for sequence in sorted(draining, key=attrgetter("last_step"), reverse=True):
            if _can_continue(sequence):
                sequence.status, sequence.slot = RUNNING, heappop(self._free_slots)
                insort(self.running, sequence, key=attrgetter("rank"))
                self._returning.add(sequence)
            else:
                self._requeue(sequence)
        for sequence in self.running:
            self._note_lost(sequence)
            self.block_manager.roll_back(sequence)
            sequence.last_step = -1
        for sequence in self.waiting:
            sequence.last_step = -1
        self.waiting.find_suspects()
        if self.block_manager.pool.offload:
            self.block_manager.pool.offload.lose()
        self._removed.clear()
        self.num_steps = 0
        self.epoch = NO_GROUP
        for sequence in given_up:
            self.finish(sequence, "abort")
        return given_up

    def begin(self, epoch: int, has_memory: bool, memory: int = 0) -> None:
        """Make plans for new workers, after `lose_plans`; all wait if the KV memory is lost.

        memory: `WorkerGroup.memory`.
        """
        self.epoch = epoch
        if not has_memory:
            for sequence in reversed(self.running):
                self.preempt(sequence)
            self.block_manager.forget(memory)


def _can_continue(sequence: Sequence) -> bool:
    """Return whether a sequence keeps its blocks after a death; a suspect must wait to be alone."""
    needs_all = sequence.is_suspect or sequence.needs_prompt_logprobs
    return sequence.num_confirmed_tokens > 0 and not needs_all
