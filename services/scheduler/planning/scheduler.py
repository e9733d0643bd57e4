"""The policy of the pipeline: the choice of sequences for each step. No sockets, no clock.

`schedule` makes plans, up to `max_plans` ahead of `update`, which takes the tokens of the oldest
plan. A plan is made without the tokens of earlier plans in flight: only their number, or guesses,
are known. A sequence grows only in `update`. Blocks of generated tokens are published there, too;
blocks of the prefill as soon as a plan computes them.
"""

from bisect import insort
from functools import partial
from heapq import heappop
from operator import attrgetter

from penstock.protocol.config import Config
from penstock.protocol.messages.packed import unpack
from penstock.protocol.messages.plan import BatchPlan, SampledTokens
from penstock.protocol.messages.status import ITERATION_TOKENS, Histogram
from penstock.protocol.messages.structured import GRAMMAR_FAILED
from penstock.protocol.messages.worker import (
    CompileGrammars,
    CopyBlocks,
    FolderRequest,
    GrammarCompiled,
)
from penstock.services.scheduler.blocks.block_manager import BlockManager
from penstock.services.scheduler.blocks.offload_index import OffloadIndex
from penstock.services.scheduler.planning.draft_scheduler import DraftScheduler
from penstock.services.scheduler.planning.in_flight_plan import PlanBuilder, PlanOutput, row_of
from penstock.services.scheduler.planning.scheduler_base import SchedulerBase
from penstock.services.scheduler.sequences.sequence import Sequence, Status


class Scheduler(SchedulerBase):
    """Continuous batching over a pool of KV blocks: decode first, then chunks of prefill."""

    def __init__(
        self, config: Config, max_model_len: int, block_manager: BlockManager, epoch: int = 0
    ) -> None:
        super().__init__(config, block_manager, epoch)
        # limit of plans in flight; may change at any time
        self.max_plans = config.num_plans_in_flight
        # tokens that were computed again after preemptions and deaths
        self.num_recomputed_tokens = 0
        self.step_tokens = Histogram.of(ITERATION_TOKENS)
        # copies for the newest plan, which workers must receive before the plan
        self.copies: CopyBlocks | None = None
        # index of the host tier, which the current workers may not have yet
        self.offload: OffloadIndex | None = None
        self._block_size = block_manager.block_size
        self._max_tokens_per_step = config.max_num_batched_tokens
        self._max_length = min(max_model_len, block_manager.pool.num_blocks * self._block_size)
        self.draft_scheduler = DraftScheduler(config, block_manager)
        self._speculates = config.speculative_method == "ngram"

    # ---- requests come and go ----------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. Raises CannotFitError.

        A sequence that an earlier attempt had completed is finished at once.
        """
        sequence.limit_length(self._max_length)
        if self._has_grammar(sequence):
            self.waiting.add(sequence)
        if len(sequence.token_ids) > sequence.num_prompt_tokens:
            self._end_if_due(sequence)

    def use_offload(self, offload: OffloadIndex | None) -> None:
        """Use an index, or none while the workers have no host tier."""
        self.offload = offload or self.offload
        self.block_manager.pool.offload = offload
        self.copies = None

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + sum(1 for _ in self.grammars.waiting)

    # ---- grammars ----------------------------------------------------------------------------

    def next_grammars(self) -> CompileGrammars | None:
        """Return what rank 0 must compile. While a suspect is tried, only its grammar is."""
        suspect = self.waiting.suspect
        if self._is_trial or (suspect and self._must_wait(suspect)):
            return None
        return self.grammars.take_message(self.epoch, alone=suspect)

    def on_compiled(self, message: GrammarCompiled) -> list[Sequence]:
        """Queue sequences whose grammar is compiled. Return those whose grammar can't be."""
        ready, failed = self.grammars.on_compiled(message)
        for sequence in ready:
            self.waiting.add(sequence)
        return failed

    # ---- the next step -----------------------------------------------------------------------

    def next_messages(self) -> list[BatchPlan | CopyBlocks | FolderRequest]:
        """Return the next plan with the messages around it, or what else workers must get."""
        plan = self.schedule()
        if not (offload := self.block_manager.pool.offload):
            return [plan] if plan else []
        around = self.copies if plan else None, plan, offload.take_request(self.epoch)
        return [one for one in around if one]

    def schedule(self) -> BatchPlan | None:
        """Return the next plan; None if `max_plans` are in flight or there is nothing to run.

        After the plan of the last sequences, an empty one follows: a worker may keep the tokens of
        a step until it has launched the next.
        """
        if len(self.in_flight) >= self.max_plans:
            return None
        builder = PlanBuilder(self.num_steps)
        plan = builder.plan
        if self.waiting.suspect and not self._is_trial:
            for sequence in reversed(self.running):
                self.preempt(sequence)
        if self._returning:
            self._return_rows(builder)
        prefilling = self._schedule_decode(builder)
        num_decoding = len(plan.sampled)
        budget = self._max_tokens_per_step - num_decoding
        budget = self._continue_prefill(prefilling, builder, budget)
        budget = self._admit(builder, budget)
        num_rows = self._max_rows - num_decoding - len(plan.chunks)
        if self._speculates:
            self.draft_scheduler.add_drafts(self.running, builder, min(num_rows, budget))
        if plan.computes:
            self.step_tokens.add(self._max_tokens_per_step - budget)
        elif not (builder.appended or (self.in_flight and self.in_flight[-1].computes)):
            return None
        self._retire_rows(builder)
        plan.sampled.sort(key=attrgetter("slot"))
        return self._launch(builder)

    def _return_rows(self, builder: PlanBuilder) -> None:
        """Add the rows of sequences that continue after a death; each has room for its tokens.

        Those whose grammar is not compiled again yet come later.
        """
        returning = [one for one in self.running if one in self._returning and one.may_run]
        for sequence in returning:
            while sequence.status is Status.RUNNING and not self.block_manager.has_place(sequence):
                self._take_block(sequence)
        for sequence in returning:
            if sequence.status is Status.RUNNING:
                self._returning.remove(sequence)
                self._add_row(sequence, builder)

    def _add_row(self, sequence: Sequence, builder: PlanBuilder) -> None:
        builder.added.append(row_of(sequence))
        if self._speculates:
            self.draft_scheduler.begin(sequence, builder.added[-1])

    def _schedule_decode(self, builder: PlanBuilder) -> list[Sequence]:
        """Plan a token for every row whose prefill is computed. Return the other rows."""
        prefilling: list[Sequence] = []
        running, sampled = self.running, builder.plan.sampled
        number, block_size = builder.plan.number, self._block_size
        for sequence in running:  # a preemption takes the last one, which then does not come
            position = sequence.num_planned_tokens
            if position < sequence.num_prefill_tokens:
                prefilling.append(sequence)
            elif (
                sequence.ngram_lookup and sequence.is_paused and position >= len(sequence.token_ids)
            ):
                pass  # the next token can only be guessed
            elif position < len(sequence.block_table) * block_size or self._append_block(
                sequence, builder
            ):
                sequence.num_planned_tokens = position + 1
                sequence.last_step = number
                sampled.append(sequence)
        return prefilling

    def _continue_prefill(
        self, prefilling: list[Sequence], builder: PlanBuilder, budget: int
    ) -> int:
        for sequence in prefilling:
            has_row = sequence.status is Status.RUNNING and sequence not in self._returning
            if has_row and self._loads(sequence, builder) and budget:
                budget -= self._add_chunk(sequence, builder, budget)
        return budget

    def _append_block(self, sequence: Sequence, builder: PlanBuilder) -> bool:
        """Give a row a block. Return False if it was preempted instead."""
        block = self._take_block(sequence)
        if block is not None:
            builder.append_block(sequence.slot, block)
        return block is not None

    def _add_chunk(self, sequence: Sequence, builder: PlanBuilder, budget: int) -> int:
        begin = sequence.num_planned_tokens
        num_tokens = min(budget, sequence.num_prefill_tokens - begin)
        sequence.num_planned_tokens = end = begin + num_tokens
        if begin < sequence.num_lost_tokens:
            self.num_recomputed_tokens += min(end, sequence.num_lost_tokens) - begin
        sequence.last_step = builder.plan.number
        builder.add_chunk(sequence, num_tokens)
        # A layer stores the keys and values of a whole step before it reads any: rows that are
        # admitted after this one, even to this plan, find its blocks.
        builder.plan.published.extend(self.block_manager.publish(sequence, end))
        if end == sequence.num_prefill_tokens:
            builder.plan.sampled.append(sequence)
        return num_tokens

    def _loads(self, sequence: Sequence, builder: PlanBuilder) -> bool:
        """Plan copies of its KV from the host; return whether it may compute in this plan.

        Copies overlap the step of other sequences. Where there are none, they precede it.
        """
        if sequence.loads:
            offload, overlapped = self.block_manager.pool.offload, builder.plan.computes
            if offload:
                offload.load_blocks(sequence, self._block_size, overlapped)
            return not overlapped
        return True

    def _admit(self, builder: PlanBuilder, budget: int) -> int:
        may_admit = budget and self._free_slots and self.block_manager.has_room(bool(self.running))
        for sequence in self.waiting.candidates() if may_admit else ():
            if self._must_wait(sequence) or not sequence.may_run:
                break
            if not self.block_manager.allocate(sequence, keep_watermark=bool(self.running)):
                self.waiting.hold(sequence)  # a sequence alone may have the whole pool
                continue
            self.waiting.admit(sequence)
            insort(self.running, sequence, key=attrgetter("rank"))
            sequence.admit(heappop(self._free_slots))
            if sequence.is_suspect:
                self._suspect = sequence
            self._add_row(sequence, builder)
            if self._loads(sequence, builder):
                budget -= self._add_chunk(sequence, builder, budget)
            if not budget or not self._free_slots:
                break
        return budget

    def _retire_rows(self, builder: PlanBuilder) -> None:
        """Remove rows whose last token this plan samples from the next plan."""
        for sequence in builder.plan.sampled:
            is_last = sequence.num_planned_tokens + 1 == sequence.max_length
            if is_last and not sequence.is_paused:
                self.running.remove(sequence)
                sequence.status = Status.DRAINING

    def _launch(self, builder: PlanBuilder) -> BatchPlan:
        message = builder.build(self.epoch, self._removed)
        self._removed.clear()
        for sequence in builder.plan.sampled:
            if sequence.status is Status.DRAINING:
                self._leave_slot(sequence)
        if offload := self.block_manager.pool.offload:
            if offload.has_blocking_stores:
                self.block_manager.pool.store_ahead(offload)
            self.copies = offload.flush(self.epoch, self.num_steps)
        self.in_flight.append(builder.plan)
        self.num_steps += 1
        return message

    # ---- its result --------------------------------------------------------------------------

    def update(self, tokens: SampledTokens) -> PlanOutput:
        """Add the tokens of the oldest plan in flight to its sequences, one for each sampled row.

        Raises ValueError for tokens of another plan.
        """
        number, token_ids = tokens.step, unpack(tokens.token_ids)
        expected = self.in_flight[0] if self.in_flight else None
        if not expected or (expected.number, len(expected.sampled)) != (number, len(token_ids)):
            raise ValueError(f"got {len(token_ids)} tokens of step {number}; expected {expected}")
        plan, confirm = self.in_flight.popleft(), self.block_manager.confirm
        output = PlanOutput([], [], [], [])
        for sequence, end in zip(plan.chunks.values(), plan.chunk_ends, strict=True):
            sequence.num_computed_tokens = end
        for sequence in plan.add_outputs(tokens):
            self.finish(sequence, "stop")
            output.finished.append(sequence)
        for sequence, token_id in plan.rows(token_ids, tokens.failed, partial(self._fail, output)):
            if sequence.finish_reason is not None:
                continue  # it ended while the plan was in flight
            lookup = sequence.ngram_lookup
            if lookup and not lookup.accept_row():
                continue
            confirm(sequence)
            sequence.token_ids.append(token_id)
            sequence.num_deaths = 0
            output.sequences.append(sequence)
            output.token_ids.append(token_id)
            if lookup:
                self.draft_scheduler.check(sequence, lookup)
            if (
                token_id in sequence.stop_token_ids
                or len(sequence.token_ids) >= sequence.max_length
            ):
                self._end_if_due(sequence)
                if sequence.finish_reason:
                    output.finished.append(sequence)
        self.block_manager.confirm_plan(plan.published, number)
        return output

    def _fail(self, output: PlanOutput, sequence: Sequence, token_id: int, reason: str) -> None:
        """End a failed row; keys and values that may be NaN are hidden from others.

        A row whose matcher failed is tried again, once, without the others that share its lexer.
        """
        if reason.startswith(GRAMMAR_FAILED):
            if sequence.status is Status.WAITING:
                return  # a later plan in flight
            if self.grammars.isolate(sequence):
                self._restart(sequence)
                return
        if token_id < 0:
            self.block_manager.unpublish(sequence)
        self.finish(sequence, "abort")
        output.failed.append((sequence, reason))

    def _restart(self, sequence: Sequence) -> None:
        if sequence.status is Status.DRAINING:
            self._requeue(sequence)
        else:
            self.preempt(sequence)

    def _end_if_due(self, sequence: Sequence) -> None:
        if sequence.is_stopped():
            self.finish(sequence, "stop")
        elif len(sequence.token_ids) >= sequence.max_length:
            self.finish(sequence, "length")
