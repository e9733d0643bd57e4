"""The scheduling policy: the choice of sequences for each step. No sockets, no clock.

`schedule` makes plans, up to `max_plans` ahead of `update`, which takes the tokens of the oldest
plan. A new plan does not know the tokens of earlier plans in flight, only their number or drafts. A
sequence grows only in `update`, which also publishes the blocks of generated tokens. Blocks of the
prefill are published as soon as a plan computes them.

After a worker failure, `lose_plans` forgets the plans in flight. Sequences continue after their
confirmed positions, as soon as `begin` is called for the next workers.
"""

from bisect import insort
from collections import deque
from collections.abc import Sequence as SequenceOf
from functools import partial
from heapq import heappop, heappush
from itertools import chain
from operator import attrgetter

from penstock.protocol.config import Config
from penstock.protocol.messages.client import FinishReason
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
from penstock.services.scheduler.blocks.block_manager import BLOCKS_PER_PLAN, BlockManager
from penstock.services.scheduler.draft_scheduler import DraftScheduler
from penstock.services.scheduler.grammar_index import GrammarIndex
from penstock.services.scheduler.in_flight_plan import (
    InFlightPlan,
    PlanBuilder,
    PlanOutput,
    row_of,
)
from penstock.services.scheduler.sequence import Sequence, Status, count_death
from penstock.services.scheduler.step_costs import StepCosts
from penstock.services.scheduler.waiting_queue import WaitingQueue

NUM_TURNS = 16  # of prompts, where steps have too little time
SHORT = 4  # steps at most that the rest of a short prompt takes
NO_GROUP = -1  # the epoch while there is no worker group


class Scheduler:
    """Continuous batching over a pool of KV blocks: decode first, then chunks of prefill."""

    def __init__(
        self, config: Config, max_model_len: int, block_manager: BlockManager, epoch: int = 0
    ) -> None:
        self.epoch = epoch  # epoch of the plans; each worker group has another epoch
        self.block_manager = block_manager
        self.waiting = WaitingQueue()
        self.grammars = GrammarIndex(config.max_num_seqs)
        self.draft_scheduler = DraftScheduler(config, block_manager)
        # running sequences by `Sequence.rank`: the last sequence is preempted first
        self.running: list[Sequence] = []
        self.in_flight: deque[InFlightPlan] = deque()
        # maximum number of plans in flight, which may change at any time
        self.max_plans = config.num_plans_in_flight
        self._least_plans = min(2, self.max_plans)  # unless a plan's tokens are awaited
        self.num_steps = self.num_preemptions = 0
        # tokens recomputed after preemptions and worker failures
        self.num_recomputed_tokens = 0
        self.step_tokens = Histogram.of(ITERATION_TOKENS)
        states = block_manager.states
        self.step_costs = StepCosts(config.target_itl_ms / 1000, states.unit if states else 1)
        # copies for the newest plan; workers must receive them before the plan
        self.copies: CopyBlocks | None = None
        self._max_length = min(max_model_len, block_manager.max_tokens)
        self._max_tokens_per_step = config.max_num_batched_tokens
        self._max_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._free_slots = list(range(self._max_rows))
        self._removed: list[int] = []  # slots that leave the persistent batch with the next plan
        # running sequences without a row at the workers, since a worker failure
        self._returning: set[Sequence] = set()
        self._suspect: Sequence | None = None  # the suspect that was admitted last, if any
        self._speculates = config.speculative_method in ("ngram", "mtp")

    # ---- requests come and go ------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. Raises CannotFitError.

        A sequence whose output is already complete, from an earlier attempt, is finished at once.
        """
        sequence.limit_length(self._max_length)
        if self._has_grammar(sequence):
            self.waiting.add(sequence)
        if len(sequence.token_ids) > sequence.num_prompt_tokens:
            self._end_if_due(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence in any state. Discard its tokens in flight."""
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

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + sum(1 for _ in self.grammars.waiting)

    # ---- suspects and grammars -----------------------------------------------------------------

    @property
    def _is_trial(self) -> bool:
        """True while a suspect runs alone, until its next token."""
        suspect, statuses = self._suspect, (Status.RUNNING, Status.DRAINING)
        return suspect is not None and suspect.is_suspect and suspect.status in statuses

    def _must_wait(self, sequence: Sequence) -> bool:
        """Return whether a sequence must wait for its plans in flight, or for a suspect's trial."""
        if self.in_flight and sequence.last_step >= self.in_flight[0].number:
            return True
        if sequence.is_suspect and not self._is_trial:
            is_alone = self.grammars.compiling <= {sequence} and not self.running
            return not is_alone or any(plan.computes for plan in self.in_flight)
        return self._is_trial

    def _has_grammar(self, sequence: Sequence) -> bool:
        """Request a sequence's grammar. Return whether the sequence may be queued now.

        A suspect is queued without its grammar, which is compiled when nothing else runs.
        """
        waits = not sequence.is_suspect
        return self.grammars.request(sequence, waits=waits) or not waits

    def next_grammars(self) -> CompileGrammars | None:
        """Return grammars for rank 0 to compile, if any: for a suspect's trial only its grammar."""
        suspect = self.waiting.suspect
        if self._is_trial or (suspect and self._must_wait(suspect)):
            return None
        return self.grammars.take_message(self.epoch, alone=suspect)

    def on_compiled(self, message: GrammarCompiled) -> list[Sequence]:
        """Queue sequences whose grammar is compiled. Return sequences with a bad grammar."""
        ready, failed = self.grammars.on_compiled(message)
        for sequence in ready:
            self.waiting.add(sequence)
        return failed

    # ---- the next step -------------------------------------------------------------------------

    def next_messages(self) -> list[BatchPlan | CopyBlocks | FolderRequest]:
        """Return the next messages to workers: copies, plan and folder request, if any."""
        plan = self.schedule()
        request = self.block_manager.take_folder_request(self.epoch)
        messages = self.copies if plan else None, plan, request
        return [message for message in messages if message]

    def schedule(self) -> BatchPlan | None:
        """Return the next plan; None if `max_plans` are in flight or there is nothing to run.

        The plan of the last sequences is followed by an empty plan: a worker may keep the tokens of
        a step until the worker has launched the next step. While nothing runs, empty plans bring
        copies of what the folder tier lacks.
        """
        if len(self.in_flight) >= max(self.max_plans, self._least_plans):
            return None
        if self.in_flight and self.in_flight[-1].is_awaited:
            return None
        builder = PlanBuilder(self.num_steps)
        plan = builder.plan
        if self.waiting.suspect and not self._is_trial:
            for sequence in reversed(self.running):
                self.preempt(sequence, keeps=True)
        if self._returning:
            self._return_rows(builder)
        prefilling = self._schedule_decode(builder)
        num_decoding = len(plan.sampled)
        budget = self._max_tokens_per_step - num_decoding
        self.block_manager.budget = BLOCKS_PER_PLAN
        self.step_costs.begin(plan.shape, num_decoding, len(self.running) - len(prefilling))
        budget = self._share_time(prefilling, builder, budget) if prefilling else budget
        budget = self._admit(builder, budget)
        num_rows = self._max_rows - num_decoding - len(plan.chunks)
        if self._speculates:
            self.draft_scheduler.add_drafts(self.running, builder, min(num_rows, budget))
            self.draft_scheduler.ask(builder, self._max_rows - len(self.running))
            plan = builder.plan
        if plan.computes:
            self.step_tokens.add(self._max_tokens_per_step - budget)
        elif not (builder.appended or self._needs_empty_plan()):
            return None
        self._retire_rows(builder)
        plan.sampled.sort(key=attrgetter("slot"))
        return self._launch(builder)

    def _needs_empty_plan(self) -> bool:
        return self.in_flight[-1].computes if self.in_flight else self.block_manager.save()

    def _return_rows(self, builder: PlanBuilder) -> None:
        """Add rows for sequences that continue after a worker failure, with room for their tokens.

        Sequences whose grammar must be compiled again come in a later plan.
        """
        returning = [
            sequence
            for sequence in self.running
            if sequence in self._returning and sequence.may_run
        ]
        for sequence in returning:
            while sequence.status is Status.RUNNING and not sequence.has_place:
                self._take_block(sequence)
        for sequence in returning:
            if sequence.status is Status.RUNNING:
                self._returning.remove(sequence)
                self._add_row(sequence, builder)

    def _add_row(self, sequence: Sequence, builder: PlanBuilder) -> None:
        builder.added.append(row_of(sequence))
        if self._speculates:
            self.draft_scheduler.begin(sequence)

    def _schedule_decode(self, builder: PlanBuilder) -> list[Sequence]:
        """Plan a token for each sequence after its prefill. Return sequences in prefill."""
        prefilling: list[Sequence] = []
        running, sampled = self.running, builder.plan.sampled
        number = builder.plan.number
        for sequence in running:  # a preemption removes the last sequence from `running`
            position = sequence.num_planned_tokens
            if position < sequence.num_prefill_tokens:
                prefilling.append(sequence)
            elif sequence.is_paused and position >= len(sequence.token_ids):
                pass  # only a draft can name the next input token
            elif position < sequence.capacity or self._append_block(sequence, builder):
                sequence.num_planned_tokens = position + 1
                sequence.last_step = number
                sampled.append(sequence)
        return prefilling

    def _share_time(self, prefilling: list[Sequence], builder: PlanBuilder, budget: int) -> int:
        """Continue prefill. If a step has no time for all of the first prompt, all take turns.

        In one of NUM_TURNS the first prompt comes first, in another one the others that have begun.
        Otherwise short ones that have begun come first, then new ones, then long ones, also at
        their end. So short ones seldom wait for long ones, and long ones advance.
        """
        costs, shape = self.step_costs, builder.plan.shape
        builder.limits = [SHORT * costs.most_tokens(shape, 0, has) for has in (False, True)]
        first = prefilling[0]
        is_enough = self._most_tokens(first, builder) >= min(budget, first.num_unplanned_tokens)
        turn = builder.plan.number % NUM_TURNS
        if is_enough or turn == 0:
            return self._continue_prefill(prefilling, builder, budget)
        is_late = {each: builder.is_long(each, each.needs_prompt_logprobs) for each in prefilling}
        prefilling.sort(key=lambda each: (is_late[each], each.num_unplanned_tokens))
        num_early = len(prefilling) - sum(is_late.values())
        if turn == NUM_TURNS // 2:
            num_early = len(prefilling) - 1
            prefilling.append(prefilling.pop(prefilling.index(first)))
        late = prefilling[num_early:]
        budget = self._continue_prefill(prefilling[:num_early], builder, budget)
        budget = self._admit(builder, budget, late)
        return self._continue_prefill(late, builder, budget)

    def _continue_prefill(
        self, prefilling: list[Sequence], builder: PlanBuilder, budget: int
    ) -> int:
        for sequence in prefilling:
            has_row = sequence.status is Status.RUNNING and sequence not in self._returning
            if has_row and self._loads(sequence, builder) and budget:
                budget -= self._add_chunk(sequence, builder, budget)
        return budget

    def _append_block(self, sequence: Sequence, builder: PlanBuilder) -> bool:
        """Append a block to a row. Return False if the sequence was preempted instead."""
        block = self._take_block(sequence)
        if block is not None:
            builder.append_block(sequence.slot, block)
        return block is not None

    def _add_chunk(self, sequence: Sequence, builder: PlanBuilder, budget: int) -> int:
        begin = sequence.num_planned_tokens
        most = self._most_tokens(sequence, builder)
        if most < budget:
            builder.cut.append(sequence)
            budget = most
        end = self.block_manager.chunk_end(sequence, begin + budget)
        if end == begin:
            return 0  # the budget is less than a chunk that this model takes
        builder.plan.kept_states.extend(self.block_manager.publish_loaded(sequence))
        sequence.num_planned_tokens = end
        if begin < sequence.num_lost_tokens:
            self.num_recomputed_tokens += min(end, sequence.num_lost_tokens) - begin
        sequence.last_step = builder.plan.number
        builder.add_chunk(sequence, end - begin)
        # Each layer stores the KV of a whole step before it reads any KV. So sequences that are
        # admitted later, even to this plan, can share these blocks.
        builder.plan.published.extend(self.block_manager.publish(sequence, end))
        if end == sequence.num_prefill_tokens:
            builder.plan.sampled.append(sequence)
        return end - begin

    def _most_tokens(self, sequence: Sequence, builder: PlanBuilder) -> int:
        """Return how many tokens of a sequence's prompt the step has time for."""
        begin, has_logits = sequence.num_planned_tokens, sequence.needs_prompt_logprobs
        return self.step_costs.most_tokens(builder.plan.shape, begin, has_logits)

    def _loads(self, sequence: Sequence, builder: PlanBuilder) -> bool:
        """Plan a sequence's copies from the host. Return whether it may compute in this plan.

        The copies overlap the step of other sequences, or precede a step without others.
        """
        if sequence.loads:
            overlapped = builder.plan.computes
            self.block_manager.load(sequence, overlapped)
            return not overlapped
        return True

    def _admit(self, builder: PlanBuilder, budget: int, late: SequenceOf[Sequence] = ()) -> int:
        """Admit waiting sequences, unless running ones will compute what they may share.

        A short one does not wait for a long one. late: those that come later in this step.
        """
        may_admit = budget and self._free_slots and self.block_manager.has_room(bool(self.running))
        for sequence in self.waiting.candidates() if may_admit else ():
            if self._must_wait(sequence) or not sequence.may_run:
                break
            others = (
                (other, self.block_manager.shared_end(sequence, other))
                for other in chain(builder.cut, late)
                if builder.is_long(sequence) or not builder.is_long(other)
            )
            if awaited := next((pair for pair in others if pair[1]), None):
                self.waiting.await_blocks(sequence, *awaited)
                continue
            most = min(budget, self._most_tokens(sequence, builder))
            if not self.block_manager.is_chunk(sequence, most):
                break
            is_allocated = self.block_manager.allocate(sequence, bool(self.running))
            may_admit = self.block_manager.budget > 0
            if not is_allocated:
                if not may_admit:
                    break  # the next plan hashes more blocks
                self.waiting.hold(sequence)  # every sequence fits when it is alone
                continue
            self.waiting.admit(sequence)
            insort(self.running, sequence, key=attrgetter("rank"))
            sequence.admit(heappop(self._free_slots))
            if sequence.is_suspect:
                self._suspect = sequence
            self._add_row(sequence, builder)
            if self._loads(sequence, builder):
                budget -= self._add_chunk(sequence, builder, budget)
            if not (budget and self._free_slots and may_admit):
                break
        return budget

    def _retire_rows(self, builder: PlanBuilder) -> None:
        """Retire sequences whose last token this plan samples: the next plan omits them."""
        for sequence in builder.plan.sampled:
            is_last = sequence.num_planned_tokens + 1 == sequence.max_length
            if is_last and not sequence.is_paused:
                self.running.remove(sequence)
                sequence.status = Status.DRAINING

    def _launch(self, builder: PlanBuilder) -> BatchPlan:
        if self.block_manager.states:
            self._advance_states(builder)
        message = builder.build(self.epoch, self._removed, self.max_plans == 1)
        self._removed.clear()
        for sequence in builder.plan.sampled:
            if sequence.status is Status.DRAINING:
                self._leave_slot(sequence)
        self.copies = self.block_manager.take_copies(self.epoch, self.num_steps)
        self.in_flight.append(builder.plan)
        self.num_steps += 1
        return message

    def _advance_states(self, builder: PlanBuilder) -> None:
        plan = builder.plan
        chunk_ends = dict(zip(plan.chunks.values(), plan.chunk_ends, strict=True))
        sequences = dict.fromkeys([*plan.sampled, *chunk_ends])
        named, kept = self.block_manager.advance_states(sequences, chunk_ends, plan.number)
        builder.states += named
        plan.kept_states.extend(kept)

    # ---- its result ----------------------------------------------------------------------------

    def update(self, tokens: SampledTokens) -> PlanOutput:
        """Add the tokens of the oldest plan in flight to its sequences, a token per sampled row.

        Raises ValueError for tokens of another plan.
        """
        number, token_ids = tokens.step, unpack(tokens.token_ids)
        expected = self.in_flight[0] if self.in_flight else None
        if not expected or (expected.number, len(expected.sampled)) != (number, len(token_ids)):
            raise ValueError(f"got {len(token_ids)} tokens of step {number}; expected {expected}")
        plan, confirm = self.in_flight.popleft(), self.block_manager.confirm
        output = PlanOutput([], [], [], [], {}, [], plan.computes)
        for sequence, end in zip(plan.chunks.values(), plan.chunk_ends, strict=True):
            sequence.confirm_chunk(end)
        for sequence in plan.add_outputs(tokens, output.prompts):
            self.finish(sequence, "stop")
            output.finished.append(sequence)
        rows = plan.rows(token_ids, tokens, partial(self._fail, output))
        for sequence, token_id, logprobs in rows:
            if sequence.finish_reason is not None:
                continue  # the sequence ended while the plan was in flight
            proposer = sequence.proposer
            if proposer and not proposer.accept_row():
                continue
            confirm(sequence)
            sequence.token_ids.append(token_id)
            if logprobs:
                sequence.add_logprobs(logprobs)
                output.logprobs[len(output.sequences)] = logprobs
            sequence.num_deaths = 0
            output.sequences.append(sequence)
            output.token_ids.append(token_id)
            if proposer:
                self.draft_scheduler.check(sequence, proposer)
            is_last = len(sequence.token_ids) >= sequence.max_length
            if (is_last or token_id in sequence.stop_token_ids) and self._end_if_due(sequence):
                output.finished.append(sequence)
        self.block_manager.confirm_plan(number, plan.published, plan.kept_states)
        self.step_costs.measure(plan.shape, tokens.seconds)
        self.draft_scheduler.take(plan, tokens.drafts)
        return output

    def _fail(self, output: PlanOutput, sequence: Sequence, token_id: int, reason: str) -> None:
        """End the sequence of a failed row. Hide blocks that may contain NaN.

        If the grammar's matcher failed, retry the sequence once with a lexer of its own, and
        without drafts, whose masks also count for the lexer's limits.
        """
        if reason.startswith(GRAMMAR_FAILED):
            if sequence.status is Status.WAITING:
                self.block_manager.free(sequence)  # was kept for tokens that do not come
                return  # from a later plan in flight
            if self.grammars.isolate(sequence):
                sequence.may_have_drafts = False
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

    def _end_if_due(self, sequence: Sequence) -> bool:
        """End a sequence at a stop token or its last token. Return whether it has ended."""
        if sequence.is_stopped():
            self.finish(sequence, "stop")
        elif len(sequence.token_ids) >= sequence.max_length:
            self.finish(sequence, "length")
        return sequence.finish_reason is not None

    # ---- slots and blocks ----------------------------------------------------------------------

    def preempt(self, sequence: Sequence, keeps: bool = False) -> None:
        """Preempt a running sequence: free its slot and blocks. Its KV is recomputed later.

        keeps: except for what the cache and the host tier can keep.
        """
        self.running.remove(sequence)
        self._leave_slot(sequence)
        self._requeue(sequence, keeps)

    def _requeue(self, sequence: Sequence, keeps: bool = False) -> None:
        self._note_lost(sequence)
        checkpoints = self.block_manager.free(sequence, keeps)
        if checkpoints and self.in_flight:
            self.in_flight[-1].kept_states.extend(checkpoints)
        sequence.status = Status.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        if self._has_grammar(sequence):
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
        """Append a block, after preemptions if needed. Return None if `sequence` is preempted."""
        while not self.block_manager.num_free_blocks:
            victim = self.running[-1]
            self.preempt(victim, keeps=True)
            if victim is sequence:
                return None
        return self.block_manager.append(sequence)

    # ---- worker failures -----------------------------------------------------------------------

    @property
    def at_risk(self) -> set[Sequence]:
        """Sequences that may kill the workers: in flight, or with a grammar in compilation."""
        in_flight = {sequence for plan in self.in_flight for sequence in plan.sequences}
        return in_flight | self.grammars.compiling

    def lose_plans(self) -> list[Sequence]:
        """Forget the plans in flight after a worker failure. Finish and return poison requests.

        The next workers may have the same KV memory, in which only writes of these plans are
        uncertain. A sequence with confirmed positions keeps its blocks and continues after these
        positions. Other sequences are requeued.
        """
        plans = list(self.in_flight)
        in_flight = self.at_risk
        given_up = count_death(in_flight)
        self.in_flight.clear()
        self.grammars.lose()
        self.step_costs.forget_sizes()
        for plan in plans:
            self.block_manager.hide(plan.published, plan.kept_states)
        for sequence in in_flight:
            if sequence.status is Status.WAITING:
                self.block_manager.free(sequence)  # what was kept for it is uncertain
        draining = [sequence for sequence in in_flight if sequence.status is Status.DRAINING]
        self._returning.update(self.running)  # the next workers have no rows
        for sequence in reversed(list(self.running)):
            if not self._can_continue(sequence):
                self.preempt(sequence)
        for sequence in sorted(draining, key=attrgetter("last_step"), reverse=True):
            if self._can_continue(sequence):
                sequence.status, sequence.slot = Status.RUNNING, heappop(self._free_slots)
                insort(self.running, sequence, key=attrgetter("rank"))
                self._returning.add(sequence)
            else:
                self._requeue(sequence)
        for sequence in self.running:
            self._note_lost(sequence)
            self.block_manager.restore(sequence, plans[0].number if plans else self.num_steps)
            sequence.last_step = -1
        self._queue_again()
        self.block_manager.lose_copies()
        self._removed.clear()
        self.num_steps = 0
        self.epoch = NO_GROUP
        for sequence in given_up:
            self.finish(sequence, "abort")
        return given_up

    def _queue_again(self) -> None:
        """Requeue waiting sequences that have become suspects or have lost their grammar."""
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

    def _can_continue(self, sequence: Sequence) -> bool:
        """Return whether a sequence keeps its blocks. A suspect must wait, to run alone."""
        needs_all = sequence.is_suspect or sequence.needs_prompt_logprobs
        return not needs_all and sequence.num_confirmed_tokens > 0

    def begin(
        self,
        epoch: int,
        has_memory: bool,
        memory_id: int = 0,
        state_ranges: list[tuple[int, int]] | None = None,
    ) -> None:
        """Begin an epoch with new workers, after `lose_plans`.

        Preempt all sequences if the KV memory is lost, and a sequence whose recurrent state is not
        that of its confirmed positions. memory_id, state_ranges: those of `WorkerGroup`.
        """
        self.epoch = epoch
        for sequence in list(reversed(self.running)):
            if not (has_memory and self.block_manager.resume(sequence, state_ranges or [])):
                self.preempt(sequence)
        if not has_memory:
            self.block_manager.forget(memory_id)
