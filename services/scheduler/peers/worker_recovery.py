"""Recovery from lost workers: sequences continue after the positions that are confirmed."""

from bisect import insort
from heapq import heappop
from operator import attrgetter

from penstock.services.scheduler.peers.poison import count_death
from penstock.services.scheduler.peers.workers import NO_GROUP
from penstock.services.scheduler.planning.scheduler import Scheduler
from penstock.services.scheduler.sequences.sequence import Sequence, Status


class RecoverableScheduler(Scheduler):
    """A scheduler that outlives its workers."""

    @property
    def at_risk(self) -> set[Sequence]:
        """Sequences of which the workers may die: in flight, or their grammar is compiled."""
        in_flight = {sequence for plan in self.in_flight for sequence in plan.sequences}
        return in_flight | self.grammars.compiling

    def lose_plans(self) -> list[Sequence]:
        """Forget the plans in flight: the workers died, and other ones may have their memory.

        Only what these plans wrote is uncertain. A sequence with confirmed positions keeps its
        blocks and continues there; others wait. Return the sequences that are given up, and ended,
        as poison requests.
        """
        plans = list(self.in_flight)
        in_flight = self.at_risk
        given_up = count_death(in_flight)
        self.in_flight.clear()
        self.grammars.lose()
        for plan in plans:
            self.block_manager.pool.hide(block for block, _ in plan.published)
        draining = [sequence for sequence in in_flight if sequence.status is Status.DRAINING]
        self._returning.update(self.running)  # the next workers have no rows
        for sequence in [one for one in reversed(self.running) if not _can_continue(one)]:
            self.preempt(sequence)
        for sequence in sorted(draining, key=attrgetter("last_step"), reverse=True):
            if _can_continue(sequence):
                sequence.status, sequence.slot = Status.RUNNING, heappop(self._free_slots)
                insort(self.running, sequence, key=attrgetter("rank"))
                self._returning.add(sequence)
            else:
                self._requeue(sequence)
        for sequence in self.running:
            self._note_lost(sequence)
            self._roll_back(sequence)
            sequence.last_step = -1
        self._queue_again()
        if self.block_manager.pool.offload:
            self.block_manager.pool.offload.lose()
        self._removed.clear()
        self.num_steps = 0
        self.epoch = NO_GROUP
        for sequence in given_up:
            self.finish(sequence, "abort")
        return given_up

    def _queue_again(self) -> None:
        """Move what has become a suspect to the suspects, and what has lost its grammar to wait."""
        no_grammar = list(self.grammars.waiting)
        for sequence in list(self.waiting):
            sequence.last_step = -1
            if sequence.is_suspect or not sequence.may_run:
                self.waiting.remove(sequence)
                if self._has_grammar(sequence):
                    self.waiting.add(sequence)
        for sequence in no_grammar:
            sequence.last_step = -1
            if sequence.is_suspect and self._has_grammar(sequence):
                self.waiting.add(sequence)

    def _roll_back(self, sequence: Sequence) -> None:
        """Continue after the confirmed positions; the table stays, and all else is prefilled."""
        confirmed = num_confirmed_tokens(sequence)
        sequence.num_planned_tokens = sequence.num_computed_tokens = confirmed
        sequence.num_prefill_tokens = len(sequence.token_ids)
        if not self.block_manager.is_published(sequence, confirmed):  # those in flight are hidden
            sequence.num_published_blocks = sequence.published_content = 0
            blocks = self.block_manager.publish(sequence, confirmed)
            self.block_manager.pool.confirm(blocks)

    def begin(self, epoch: int, has_memory: bool, memory_id: int = 0) -> None:
        """Make plans for new workers, after `lose_plans`; all wait if the KV memory is lost.

        memory_id: `WorkerGroup.memory_id`.
        """
        self.epoch = epoch
        if not has_memory:
            for sequence in reversed(self.running):
                self.preempt(sequence)
            self.block_manager.forget(memory_id)


def _can_continue(sequence: Sequence) -> bool:
    """Return whether a sequence keeps its blocks after a death; a suspect must wait to be alone."""
    needs_all = sequence.is_suspect or sequence.needs_prompt_logprobs
    return num_confirmed_tokens(sequence) > 0 and not needs_all


def num_confirmed_tokens(sequence: Sequence) -> int:
    """Return positions whose KV no plan in flight writes; 0 while its first plan is in flight."""
    if sequence.num_computed_tokens < sequence.num_prefill_tokens:
        return sequence.num_computed_tokens
    return len(sequence.token_ids) - 1
