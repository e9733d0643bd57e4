"""The policy of the pipeline: which sequences run in which step. No sockets, no clock.

`schedule` makes plans and may run up to `max_plans` plans ahead of `update`, which takes the tokens
of the oldest plan. A plan is made without knowing the tokens of those before it: only their number,
or guesses. `update` is the only place where a sequence grows or ends. Blocks of generated tokens
are published there, too; those of given tokens as soon as a plan computes them.
"""

from bisect import insort
from collections import deque
from functools import partial
from heapq import heappop, heappush
from operator import attrgetter

from penstock.protocol.config import Config
from penstock.protocol.messages.client import FinishReason
from penstock.protocol.messages.metrics import ITERATION_TOKENS, Histogram
from penstock.protocol.messages.plan import BatchPlan, SampledTokens, unpack
from penstock.services.scheduler.block_manager import BlockManager
from penstock.services.scheduler.checks import limit_length
from penstock.services.scheduler.in_flight_plan import Changes, Step, StepOutput
from penstock.services.scheduler.ngram_proposer import Drafter
from penstock.services.scheduler.sequence import Sequence, Status
from penstock.services.scheduler.suspects import Trial, count_death
from penstock.services.scheduler.waiting_queue import WaitingQueue

WAITING, RUNNING, DRAINING, FINISHED = Status


class Scheduler:
    """Continuous batching over a pool of KV blocks: decode first, then chunks of prefill."""

    def __init__(
        self, config: Config, max_model_len: int, block_manager: BlockManager, epoch: int = 0
    ) -> None:
        self.epoch = epoch
        """of the plans; a new group of workers has a new one"""
        self.block_manager = block_manager
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        """by `Sequence.rank`: the last one is the first to be preempted"""
        self.in_flight: deque[Step] = deque()
        self.max_plans = config.num_plans_in_flight
        """in flight at once; may be changed at any time"""
        self.num_steps = self.num_preemptions = 0
        self.step_tokens = Histogram.of(ITERATION_TOKENS)
        self._block_size = block_manager.block_size
        self._max_tokens_per_step = config.max_num_batched_tokens
        self._max_length = min(max_model_len, block_manager.num_tokens)
        self._max_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._free_slots = list(range(self._max_rows))
        self.drafter = Drafter(config, block_manager)
        self._trial = Trial(self.running, self.in_flight)
        self._removed: list[int] = []
        """slots to leave the persistent batch with the next plan"""

    # ---- requests come and go ----------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Puts a new sequence into the queue. Raises CannotFitError.

        A sequence that an earlier attempt had brought to its end is finished at once.
        """
        limit_length(sequence, self._max_length)
        self.waiting.add(sequence)
        if len(sequence.token_ids) > sequence.num_prompt_tokens:
            self._end_if_due(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence in whatever state it is. What is in flight of it is discarded."""
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
        """Takes a running sequence's slot and blocks; its tokens are kept, their KV recomputed."""
        self.running.remove(sequence)
        self._leave_slot(sequence)
        self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        self.block_manager.free(sequence)
        sequence.status = WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.put_back(sequence)

    def _leave_slot(self, sequence: Sequence) -> None:
        self._removed.append(sequence.slot)
        heappush(self._free_slots, sequence.slot)
        sequence.slot = -1

    def restart(self, epoch: int) -> list[Sequence]:
        """New workers, with empty KV: everything is `waiting` again and nothing is in flight.

        Returns the sequences that are given up, and ended, because they may kill workers.
        """
        in_flight = {sequence for step in self.in_flight for sequence in step.sequences}
        given_up = count_death(in_flight)
        draining = [sequence for sequence in in_flight if sequence.status is DRAINING]
        for sequence in reversed(self.running):
            self.preempt(sequence)
        for sequence in sorted(draining, key=attrgetter("last_step"), reverse=True):
            self._requeue(sequence)
        self.in_flight.clear()
        for sequence in self.waiting:
            sequence.last_step = -1
        self.waiting.find_suspects()
        self._removed.clear()
        self.num_steps = 0
        self.epoch = epoch
        self.block_manager.forget()
        for sequence in given_up:
            self.finish(sequence, "abort")
        return given_up

    # ---- the next step -----------------------------------------------------------------------

    def schedule(self) -> BatchPlan | None:
        """The next plan; None if enough plans are in flight or there is nothing to run.

        When the last sequences drain, an empty plan follows: a worker may keep the tokens of a step
        until it has launched another.
        """
        if len(self.in_flight) >= self.max_plans:
            return None
        step = Step(self.num_steps, [], {})
        changes = Changes([], [], [], [])
        if self.waiting.has_suspects and not self._trial.is_on:
            for sequence in reversed(self.running):
                self.preempt(sequence)
        prefilling = self._schedule_decode(step, changes)
        num_decoding = len(step.sampled)
        budget = self._max_tokens_per_step - num_decoding
        for sequence in prefilling:
            if budget and sequence.status is RUNNING:
                budget -= self._add_chunk(sequence, step, changes, budget)
        budget = self._admit(step, changes, budget)
        num_rows = self._max_rows - num_decoding - len(step.chunks)
        self.drafter.add(self.running, step, changes, min(num_rows, budget))
        if step.computes:
            self.step_tokens.add(self._max_tokens_per_step - budget)
        elif not (self.in_flight and self.in_flight[-1].computes):
            return None
        self._retire_rows(step)
        step.sampled.sort(key=attrgetter("slot"))
        return self._send(step, changes)

    def _schedule_decode(self, step: Step, changes: Changes) -> list[Sequence]:
        """Plans a token for every row behind its prefill; returns the rows still in it."""
        prefilling: list[Sequence] = []
        running, sampled = self.running, step.sampled
        number, block_size = step.number, self._block_size
        index = 0
        while index < len(running):
            sequence = running[index]
            position = sequence.num_planned_tokens
            if position < sequence.num_prefill_tokens:
                prefilling.append(sequence)
            elif sequence.speculation and sequence.rests and position >= len(sequence.token_ids):
                pass  # what comes next can only be guessed
            elif position < len(sequence.block_table) * block_size or self._append_block(
                sequence, changes
            ):
                sequence.num_planned_tokens = position + 1
                sequence.last_step = number
                sampled.append(sequence)
            index += 1
        return prefilling

    def _append_block(self, sequence: Sequence, changes: Changes) -> bool:
        """Gives `sequence` a block, at the cost of newer ones; False if it was the newest."""
        while not self.block_manager.num_free_blocks:
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        changes.append(sequence.slot, self.block_manager.append(sequence))
        return True

    def _add_chunk(self, sequence: Sequence, step: Step, changes: Changes, budget: int) -> int:
        num_tokens = min(budget, sequence.num_prefill_tokens - sequence.num_planned_tokens)
        sequence.num_planned_tokens += num_tokens
        sequence.last_step = step.number
        changes.chunks.extend((sequence.slot, num_tokens))
        step.chunks[sequence.slot] = sequence
        # A layer stores the keys and values of a whole step before it reads any: the rows that
        # are admitted behind this one, even to this plan, find its blocks.
        self.block_manager.publish(sequence, sequence.num_planned_tokens)
        if sequence.num_planned_tokens == sequence.num_prefill_tokens:
            step.sampled.append(sequence)
        return num_tokens

    def _admit(self, step: Step, changes: Changes, budget: int) -> int:
        may_admit = budget and self._free_slots and self.block_manager.has_room(bool(self.running))
        for sequence in self.waiting.candidates() if may_admit else ():
            if self._is_in_flight(sequence) or self._trial.keeps_out(sequence):
                break
            if not self._allocate(sequence):
                self.waiting.hold(sequence)
                continue
            self.waiting.admit(sequence)
            self._run(sequence)
            self._trial.admitted(sequence)
            changes.added.append(sequence.as_row())
            self.drafter.begin(sequence, changes.added[-1])
            budget -= self._add_chunk(sequence, step, changes, budget)
            if not budget or not self._free_slots:
                break
        return budget

    def _run(self, sequence: Sequence) -> None:
        insort(self.running, sequence, key=attrgetter("rank"))
        sequence.admit(heappop(self._free_slots))

    def _allocate(self, sequence: Sequence) -> bool:
        """The watermark is for others: a sequence alone may have the whole pool."""
        if not self.block_manager.allocate(sequence, keep_watermark=bool(self.running)):
            return False
        if sequence.needs_prompt_logprobs:
            sequence.prompt_logprobs = []  # all are computed anew
        if not sequence.num_preemptions:
            num_found = min(sequence.num_planned_tokens, sequence.num_prompt_tokens)
            sequence.num_cached_tokens = num_found
        return True

    def _is_in_flight(self, sequence: Sequence) -> bool:
        return bool(self.in_flight) and sequence.last_step >= self.in_flight[0].number

    def _retire_rows(self, step: Step) -> None:
        """Rows whose last token is sampled by this step have no place in the next plan."""
        for sequence in step.sampled:
            if sequence.num_planned_tokens + 1 == sequence.max_length and not sequence.rests:
                self.running.remove(sequence)
                sequence.status = DRAINING

    def _send(self, step: Step, changes: Changes) -> BatchPlan:
        plan = changes.plan(self.epoch, step.number, self._removed)
        self._removed.clear()
        for sequence in step.sampled:
            if sequence.status is DRAINING:
                self._leave_slot(sequence)
        self.in_flight.append(step)
        self.num_steps += 1
        return plan

    # ---- its result --------------------------------------------------------------------------

    def update(self, tokens: SampledTokens) -> StepOutput:
        """Takes the tokens of the oldest plan in flight, one for each row it sampled.

        Raises ValueError if they are not the tokens of that plan.
        """
        number, token_ids = tokens.step, unpack(tokens.token_ids)
        expected = self.in_flight[0] if self.in_flight else None
        if not expected or (expected.number, len(expected.sampled)) != (number, len(token_ids)):
            raise ValueError(f"{len(token_ids)} tokens of step {number}; expected {expected}")
        step = self.in_flight.popleft()
        output = StepOutput([], [], [], [])
        step.take_logprobs(tokens)
        for sequence, token_id in step.rows(token_ids, tokens.failed, partial(self._fail, output)):
            if sequence.finish_reason is not None:
                continue  # it ended while the plan was in flight
            speculation = sequence.speculation
            if speculation and not speculation.takes():
                continue
            num_computed = len(sequence.token_ids)
            if num_computed // self._block_size > sequence.num_published_blocks:
                self.block_manager.publish(sequence, num_computed)
            sequence.token_ids.append(token_id)
            sequence.num_deaths = 0
            output.sequences.append(sequence)
            output.token_ids.append(token_id)
            if speculation:
                self.drafter.check(sequence, speculation)
            if token_id in sequence.stop_token_ids or num_computed + 1 >= sequence.max_length:
                self._end_if_due(sequence)
                output.finished.append(sequence)
        return output

    def _fail(self, output: StepOutput, sequence: Sequence, token_id: int, reason: str) -> None:
        """Ends a row that can't go on; keys and values that may be NaN are for nobody."""
        if token_id < 0:
            self.block_manager.unpublish(sequence)
        self.finish(sequence, "abort")
        output.failed.append((sequence, reason))

    def _end_if_due(self, sequence: Sequence) -> None:
        if sequence.token_ids[-1] in sequence.stop_token_ids:
            self.finish(sequence, "stop")
        elif len(sequence.token_ids) >= sequence.max_length:
            self.finish(sequence, "length")
