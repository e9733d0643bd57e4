"""The state of the scheduler: sequences that wait, run and drain, and plans in flight."""

from collections import deque
from heapq import heappush

from penstock.protocol.config import Config
from penstock.protocol.messages.client import FinishReason
from penstock.services.scheduler.blocks.block_manager import BlockManager
from penstock.services.scheduler.planning.grammar_index import GrammarIndex
from penstock.services.scheduler.planning.in_flight_plan import InFlightPlan
from penstock.services.scheduler.planning.waiting_queue import WaitingQueue
from penstock.services.scheduler.sequences.sequence import Sequence, Status


class SchedulerBase:
    """Moves of sequences between the queue, the slots and their end. No plan is made here.

    `Scheduler` makes the plans, `RecoverableScheduler` survives the death of workers.
    """

    def __init__(self, config: Config, block_manager: BlockManager, epoch: int) -> None:
        self.epoch = epoch  # epoch of the plans; each group of workers has its own
        self.block_manager = block_manager
        self.waiting = WaitingQueue()
        self.grammars = GrammarIndex(config.max_num_seqs)
        # running sequences by `Sequence.rank`: the last one is the first to be preempted
        self.running: list[Sequence] = []
        self.in_flight: deque[InFlightPlan] = deque()
        self.num_steps = self.num_preemptions = 0
        self._max_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._free_slots = list(range(self._max_rows))
        self._removed: list[int] = []  # slots that leave the persistent batch with the next plan
        # running sequences that the workers do not have, since the death of earlier ones
        self._returning: set[Sequence] = set()
        self._suspect: Sequence | None = None  # the suspect that was admitted last, if any

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence in any state. Its tokens in flight are discarded."""
        if sequence.status is Status.FINISHED:
            return
        awaits_grammar = self.grammars.release(sequence)
        if sequence.status is Status.WAITING and not awaits_grammar:
            self.waiting.remove(sequence)
        elif sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._leave_slot(sequence)
        self.block_manager.free(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason

    def preempt(self, sequence: Sequence) -> None:
        """Take slot and blocks from a running sequence; the KV of its tokens is recomputed."""
        self.running.remove(sequence)
        self._leave_slot(sequence)
        self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        self._note_lost(sequence)
        self.block_manager.free(sequence)
        sequence.status = Status.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        if self._has_grammar(sequence):
            self.waiting.put_back(sequence)

    def _has_grammar(self, sequence: Sequence) -> bool:
        """Return whether a sequence may be queued; otherwise it waits for its grammar first.

        A suspect is queued: its grammar is compiled when nothing else runs.
        """
        waits = not sequence.is_suspect
        return self.grammars.request(sequence, waits=waits) or not waits

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
        while not self.block_manager.pool.num_free_blocks:
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return None
        return self.block_manager.append(sequence)

    @property
    def _is_trial(self) -> bool:
        """True while a suspect runs that has not got a token yet: it runs alone."""
        one, statuses = self._suspect, (Status.RUNNING, Status.DRAINING)
        return one is not None and one.is_suspect and one.status in statuses

    def _must_wait(self, sequence: Sequence) -> bool:
        """Return whether a sequence is still in flight, or waits for a trial, perhaps its own."""
        if self.in_flight and sequence.last_step >= self.in_flight[0].number:
            return True
        if sequence.is_suspect and not self._is_trial:
            is_alone = self.grammars.compiling <= {sequence} and not self.running
            return not is_alone or any(plan.computes for plan in self.in_flight)
        return self._is_trial
