"""A scheduler and a reference worker; plans run when they are sent, results come when asked for."""

import math
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import msgspec

from penstock.protocol.config import Config
from penstock.protocol.messages.client import FinishReason
from penstock.protocol.messages.packed import unpack
from penstock.protocol.messages.plan import BatchPlan, SampledTokens
from penstock.protocol.messages.worker import GrammarCompiled
from penstock.services.scheduler.blocks.block_manager import BlockManager
from penstock.services.scheduler.blocks.block_pool import BlockPool
from penstock.services.scheduler.in_flight_plan import PlanBuilder, PlanOutput
from penstock.services.scheduler.scheduler import Scheduler
from penstock.services.scheduler.sequence import Sequence, Status
from penstock.services.scheduler.step_costs import StepShape
from tests.services.scheduler.builders import make_sequence
from tests.services.scheduler.invariants import (
    check_blocks,
    check_logprobs,
    check_offload,
    check_output,
    check_places,
    check_slots,
    check_states,
)
from tests.services.scheduler.mortal_records import Life, SchedulerDiedError
from tests.services.scheduler.persistent_tables import PersistentTables
from tests.services.scheduler.reference import (
    ReferenceWorker,
    WorkerDiedError,
)


class Simulation:
    """Scheduler and worker without sockets. Each move checks the invariants after it.

    The tokens of a step come only when `num_ahead` later plans are there: a worker launches one
    more before it waits.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 16,
        max_model_len: int = 32,
        num_watermark_blocks: int = 0,
        num_ahead: int = 0,
        computes_once: bool = False,
        keeps_memory: bool = False,
        num_host_slots: int = 0,
        num_state_blocks: int = 0,
        num_pieces: int = 1,
        blocks_per_state: int = 0,
        machine: Callable[[StepShape], float] = lambda _: 0.0,
        **options: object,
    ) -> None:
        sizes = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32}
        self.config = msgspec.convert(sizes | {"num_plans_in_flight": 2} | options, Config)
        block_size = self.config.block_size
        num_blocks = num_state_blocks * blocks_per_state or num_blocks
        self.limit = min(max_model_len, (num_blocks - 2 * blocks_per_state) * block_size)
        self.num_blocks, self.num_watermark_blocks = num_blocks, num_watermark_blocks
        self.blocks_per_state, self.num_host_slots = blocks_per_state, num_host_slots
        self.num_state_blocks, self.num_pieces = num_state_blocks, num_pieces
        numbers = num_blocks, num_host_slots, num_state_blocks, num_pieces
        self.kept = PersistentTables(self.config, *numbers)
        self.kv = 1  # id of the worker's memory
        self.life = Life()
        self.num_confirmed = 0
        """plans of this epoch whose result has come"""
        self.num_ahead = num_ahead
        self.machine = machine  # seconds that a step takes; 0: it does not say
        self.shapes: list[StepShape] = []  # of the steps that have ended
        self.died_at: Counter[Sequence] = Counter()  # positions planned when the worker died
        self.computes_once = computes_once
        self.keeps_memory = keeps_memory
        """the memory of workers that die of poison is kept"""
        self.scheduler = self._new_scheduler(epoch=1)
        self.worker = self._new_worker(epoch=1)
        self.holds_grammars = False
        self.compiling: list[int] = []
        """grammars that the worker has not compiled yet"""
        self.plans: list[BatchPlan] = []
        self.results: deque[bytes] = deque()
        self.sequences: list[Sequence] = []
        self.received: dict[Sequence, list[int]] = {}
        """every output token, after those of an earlier attempt"""
        self.num_old: dict[Sequence, int] = {}
        """how many that were"""
        self.failed: set[Sequence] = set()
        """their grammar left no way out"""
        self.num_wasted: Counter[Sequence] = Counter()
        """rows of a sequence that ran after its end"""
        self.num_ends: Counter[Sequence] = Counter()
        """how often the scheduler said that a sequence has ended"""
        self.cut: set[Sequence] = set()
        """ended from outside, or given up"""
        self.num_deaths: Counter[Sequence] = Counter()
        """of workers while a sequence was at risk, since its last token"""

    def _new_worker(self, epoch: int) -> ReferenceWorker:
        sizes = self.computes_once, self.num_state_blocks, self.num_pieces, self.blocks_per_state
        worker = ReferenceWorker(self.config, self.num_blocks, epoch, *sizes)
        worker.host.slots *= self.num_host_slots
        return worker

    def _new_scheduler(self, epoch: int) -> Scheduler:
        self.life = Life()
        block_size, caching = self.config.block_size, self.config.enable_prefix_caching
        pool = self.kept.pool(self.kv, self.life)
        states = self.kept.state_pool(self.kv, self.life)
        sizes = block_size, self.num_watermark_blocks, caching
        blocks = BlockManager(pool, *sizes, states, self.blocks_per_state)
        scheduler = Scheduler(self.config, self.limit, blocks, epoch)
        self.kept.use_host(scheduler, self.kv, self.life)
        self.added: dict[int, list[int]] = {}
        """the tokens of the sequences that were added, by slot"""
        add_row = scheduler._add_row

        def remember(sequence: Sequence, builder: PlanBuilder) -> None:
            self.added[sequence.slot] = sequence.token_ids
            add_row(sequence, builder)

        scheduler._add_row = remember  # type: ignore[method-assign]
        return scheduler

    @property
    def pool(self) -> BlockPool:
        """The blocks."""
        return self.scheduler.block_manager.pool

    def add(
        self,
        prompt: SequenceOf[int] = (1, 2, 3),
        output: SequenceOf[int] = (),
        num_deaths: int = 0,
        **sampling: object,
    ) -> Sequence:
        """Take a request. Raises CannotFitError."""
        sequence = make_sequence(prompt, output, **sampling)
        sequence.num_deaths = self.num_deaths[sequence] = num_deaths
        self._take(sequence, output)
        self.check()
        return sequence

    def _take(self, sequence: Sequence, output: SequenceOf[int]) -> None:
        self.scheduler.add(sequence)
        self.sequences.append(sequence)
        self.received[sequence] = list(output)
        self.num_old[sequence] = len(output)
        self.num_ends[sequence] = sequence.status is Status.FINISHED

    def send(self) -> BatchPlan | None:
        """Return the next plan, if there is one; the worker runs it at once, or dies of it."""
        self.compile()
        ranks = {sequence: sequence.rank for sequence in self.scheduler.running}
        awaits_drafts = self.awaits_drafts
        try:
            plan = self.scheduler.schedule()
        except SchedulerDiedError:
            return self.restart_scheduler()
        lost = [rank for one, rank in ranks.items() if one.status is Status.WAITING]
        kept = [rank for one, rank in ranks.items() if one.status is not Status.WAITING]
        assert not lost or not kept or max(kept) < min(lost), "another one was to be preempted"
        if plan is not None:
            assert not awaits_drafts, "the plan can't name the drafts that it follows"
            self.plans.append(plan)
            try:
                frame = msgspec.msgpack.encode(plan)
                self.results.append(self.worker.run(frame, self.scheduler.copies, self.added))
            except WorkerDiedError:
                self.restart(keeps_memory=self.keeps_memory)
            self.check()
        self.worker.host.take_request(self.scheduler)
        return plan

    def compile(self) -> bool:
        """Compile all grammars that the worker is asked for, unless this is held up.

        Return whether there were any.
        """
        while message := self.scheduler.next_grammars():
            self.compiling += [number for number, _ in message.added]
        has_some = bool(self.compiling) and not self.holds_grammars
        while self.compiling and not self.holds_grammars:
            compiled = GrammarCompiled(self.scheduler.epoch, self.compiling.pop(0))
            assert not self.scheduler.on_compiled(compiled)
            self.check()
            self.compile()
        return has_some

    def answer(self, fails: bool = False) -> bool:
        """Let the worker do what a folder request says, if it has any."""
        try:
            return self.worker.host.answer(self.scheduler, fails)
        except SchedulerDiedError:
            self.restart_scheduler()
            return True

    @property
    def has_result(self) -> bool:
        """The tokens of a step are back, at once if the scheduler waits for their drafts."""
        return len(self.results) > (0 if self.awaits_drafts else self.num_ahead)

    @property
    def awaits_drafts(self) -> bool:
        in_flight = self.scheduler.in_flight
        return bool(in_flight) and in_flight[-1].is_awaited

    def receive(self) -> PlanOutput | None:
        """Return the tokens of the oldest step; None if the scheduler dies meanwhile."""
        result = msgspec.msgpack.decode(self.results.popleft(), type=SampledTokens)
        plan = self.scheduler.in_flight[0]
        rows, result.seconds = plan.sampled, self.machine(plan.shape)
        try:
            output = self.scheduler.update(result)
        except SchedulerDiedError:
            if result.failed:  # it may have hidden some blocks of the failed sequence
                self.worker.hide_blocks()
            return self.restart_scheduler()
        self.num_confirmed += 1
        self.shapes.append(plan.shape)
        for sequence, end in zip(plan.chunks.values(), plan.chunk_ends, strict=True):
            if sequence in self.died_at and end > self.died_at[sequence]:
                self.num_deaths[sequence] = 0
                del self.died_at[sequence]
        self.num_wasted.update(set(rows) - {*output.sequences, *output.finished})
        self.num_ends.update(output.finished)
        for sequence, reason in output.failed:
            assert (sequence.finish_reason, reason) == ("abort", "no way out")
            assert sequence not in self.failed
            self.failed.add(sequence)
            self.worker.hide_blocks()
        rows = zip(output.sequences, output.token_ids, strict=True)
        for index, (sequence, token_id) in enumerate(rows):
            self.received[sequence].append(token_id)
            told = output.logprobs.get(index)
            assert (told is None) == (sequence.logprobs is None)
            assert told is None or unpack(told.token_ids)[0] == token_id
            self.num_deaths[sequence] = 0
        self.check()
        return output

    def step(self) -> PlanOutput | None:
        """Every plan that may be sent, and one result; None if there is nothing to do."""
        while self.send() or self.compile() or self.answer():
            pass
        return self.receive() if self.has_result else None

    def run(self) -> "Simulation":
        """To the end of all sequences; the scheduler lives."""
        self.life.num_stores = math.inf
        self.holds_grammars = False
        for _ in range(100 * (self.limit + 1) * (len(self.sequences) + 1)):
            if self.step() is None:
                break
        self.check_end()
        return self

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Abort a request, or find a stop string."""
        if sequence.status is not Status.FINISHED:
            self.cut.add(sequence)
        try:
            self.scheduler.finish(sequence, reason)
        except SchedulerDiedError:
            self.restart_scheduler()
        self.check()

    def preempt(self, sequence: Sequence) -> None:
        """As if the blocks had run out."""
        try:
            self.scheduler.preempt(sequence, keeps=True)
        except SchedulerDiedError:
            self.restart_scheduler()
        self.check()

    def restart(self, *, keeps_memory: bool = False) -> None:
        """Lose the worker, and with it what was in flight; another one comes.

        Whoever was alone in flight at its third death in a row is given up.
        """
        at_risk = self.in_flight
        may_be_guilty = {one for one in at_risk if self.num_deaths[one] == 2 and len(at_risk) == 1}
        for sequence in at_risk:
            before = self.died_at[sequence] if self.num_deaths[sequence] else 0
            self.died_at[sequence] = max(before, sequence.num_planned_tokens)
        for sequence in at_risk - may_be_guilty:
            self.num_deaths[sequence] = min(2, self.num_deaths[sequence] + 1)
        epoch = self.scheduler.epoch + 1
        dead, self.worker = self.worker, self._new_worker(epoch)
        self.results.clear()
        self.compiling.clear()
        if keeps_memory:
            self.worker.inherit(dead, self.num_confirmed)
        self.num_confirmed = 0
        self.kv += not keeps_memory
        try:
            given_up = self.scheduler.lose_plans()
            self.check()
            self.scheduler.begin(epoch, keeps_memory, self.kv, self.worker.states.ranges())
            self.kept.use_host(self.scheduler, self.kv, self.life)
        except SchedulerDiedError:
            self.restart_scheduler()
            return
        assert set(given_up) == {one for one in may_be_guilty if one.finish_reason == "abort"}
        self.cut.update(given_up)
        self.check()

    def restart_scheduler(self, num_undelivered: int = 0, loses_worker: bool = False) -> None:
        """Lose the scheduler; the gateway resubmits what is open, and the records remain.

        num_undelivered: tokens of each sequence that the gateway lacks. loses_worker: it dies, too,
        and its memory is kept.
        """
        epoch = self.scheduler.epoch + 1
        dead, self.worker = self.worker, self._new_worker(epoch)
        self.worker.inherit(dead, self.num_confirmed, is_whole=not loses_worker)
        self.num_confirmed = 0
        self.results.clear()
        self.compiling.clear()
        self.scheduler = self._new_scheduler(epoch)
        sequences, self.sequences = self.sequences, []
        for old in sequences:
            if old in self.cut | self.failed or self.num_ends[old]:
                continue
            received = self.received[old]
            num_given = max(self.num_old[old], len(received) - num_undelivered)
            new = make_sequence(
                old.token_ids[: old.num_prompt_tokens],
                received[:num_given],
                cache_salt=old.cache_salt,
                client=old.client,
                priority=old.priority,
                pooling=old.pooling,
                is_chat=old.is_chat,
                reasoning=old.reasoning,
                **msgspec.structs.asdict(old.sampling),
            )
            self._take(new, received[:num_given])
        self.check()

    @property
    def in_flight(self) -> set[Sequence]:
        """All that the worker may be at."""
        steps = set().union(*(step.sequences for step in self.scheduler.in_flight))
        return steps | self.scheduler.grammars.compiling

    # ---- what must hold ----------------------------------------------------------------------

    def check(self) -> None:
        """At any time."""
        assert len(self.scheduler.in_flight) <= self.config.num_plans_in_flight
        states = self.scheduler.block_manager.states
        lent = check_places(self.pool, states, self.blocks_per_state) if states else set()
        check_blocks(self.pool, self.sequences, self.config.block_size, lent)
        check_slots(self.scheduler, self.config)
        check_offload(self.pool, self.sequences)
        if states:
            check_states(states, self.sequences)
        for sequence in self.sequences:
            assert self.received[sequence] == sequence.output_token_ids
            check_logprobs(sequence, self.num_old[sequence])
            has_result = sequence.pooling is not None and sequence.finish_reason == "stop"
            assert (sequence.pooled is not None) == (has_result and sequence not in self.cut)
        at_risk = self.in_flight.union(self.scheduler.running)
        for sequence in at_risk:
            if self.num_deaths[sequence] == 2 and sequence.finish_reason is None:
                assert at_risk == {sequence}, "a suspect is not alone"

    def check_end(self) -> None:
        """When nothing is left to do."""
        assert not self.scheduler.num_waiting
        assert not self.scheduler.running
        assert not any(s.sampled or s.chunks for s in self.scheduler.in_flight), "no flush came"
        assert self.scheduler.block_manager.pool.num_free_blocks == self.num_blocks
        if states := self.scheduler.block_manager.states:
            assert states.pool.num_free_blocks == states.pool.num_blocks
            assert self.blocks_per_state or states.pool.num_blocks == self.num_state_blocks
        for sequence in self.sequences:
            check_output(self, sequence)
