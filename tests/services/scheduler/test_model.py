"""Random requests, results, ends, preemptions and lost workers, against the reference.

`PENSTOCK_SEARCH=72` runs 3,600 examples for each number of plans in flight.
"""

from collections.abc import Sequence as SequenceOf
from math import lcm
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.protocol.messages.client import FinishReason
from penstock.protocol.messages.sampling import Pooling
from penstock.protocol.messages.structured import StructuredOutputs
from penstock.services.scheduler import draft_scheduler, ngram_lookup, scheduler
from penstock.services.scheduler.blocks import state_blocks
from penstock.services.scheduler.blocks.block_manager import BlockManager
from penstock.services.scheduler.sequence import CannotFitError, Sequence
from penstock.services.scheduler.step_costs import StepShape
from tests.services.scheduler.builders import make_sequence
from tests.services.scheduler.reference import POISON, expected_output
from tests.services.scheduler.simulation import Simulation

BASES = [[*head, *[1, 2, 3] * 20] for head in ([], [1, 2, 2], [2, 2, 2], [2, 1], [3, 3, 1])]
"""prompts begin like one of these, so that many share blocks, or differ in the first block only"""


NONE = st.just(0)


def slow(shape: StepShape) -> float:
    """A machine on which some chunks are longer than it has time for."""
    per_token = 10 * shape.num_tokens + shape.num_keys / 10 + 100 * shape.num_logits
    return (5 + shape.num_decoding + per_token) / 1000


timed = st.fixed_dictionaries(
    {
        "machine": st.sampled_from([lambda _: 0.0, slow]),
        "target_itl_ms": st.sampled_from([0, 0, 1, 400]),
    }
)


@st.composite
def simulations(
    draw: st.DrawFn,
    num_plans: int,
    num_host_slots: st.SearchStrategy[int] = NONE,
    num_state_blocks: st.SearchStrategy[int] = NONE,
    blocks_per_state: st.SearchStrategy[int] = NONE,
) -> Simulation:
    """Pools from one that barely holds the longest sequence to one with room for all."""
    block_size = draw(st.sampled_from([1, 2, 3, 4, 16]))
    max_model_len = draw(st.integers(2, 40))
    least = -(-max_model_len // block_size)
    states, max_num_seqs = draw(num_state_blocks), draw(st.integers(1, 6) | st.just(24))
    if size := draw(blocks_per_state):  # at least two states and the longest sequence, or less
        states = max(3, 1 + -(-least // size) + states // 2)
    least_tokens = max_num_seqs + lcm(state_blocks.STATE_CHUNK, block_size) if states else 1
    return Simulation(
        num_state_blocks=states,
        blocks_per_state=size,
        num_blocks=max(1, least + draw(st.integers(-1, 3) | st.integers(0, 3 * least))),
        max_model_len=max_model_len,
        num_watermark_blocks=draw(st.integers(0, 3)),
        num_ahead=draw(st.integers(0, min(1, num_plans - 1))),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(least_tokens, draw(st.integers(1, 16) | st.just(64))),
        num_plans_in_flight=num_plans,
        speculative_method=draw(st.sampled_from(["none", "ngram", "mtp"])),
        num_speculative_tokens=draw(st.integers(1, 6) | st.just(12)),
        enable_prefix_caching=draw(st.integers(0, 7)) > 0,
        keeps_memory=draw(st.booleans()),
        num_host_slots=draw(num_host_slots),
        num_pieces=draw(st.integers(1, 3)),
        kv_offload_folder=draw(st.sampled_from(["", "folder"])),
        **draw(timed),
    )


GRAMMARS = [StructuredOutputs(json_object=True), StructuredOutputs(regex="a")]
samplings = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2),
        "max_tokens": st.none() | st.integers(1, 12),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([[], [], [3], [3], [2, 3]]),
        "is_chat": st.booleans(),
        "reasoning": st.sampled_from(["none", "open"]),
        "speculative": st.sampled_from([True, True, True, False]),
        "logprobs": st.sampled_from([None, None, 0, 2]),
        "prompt_logprobs": st.sampled_from([None, None, None, 0, 2]),
        "pooling": st.sampled_from([None] * 5 + [Pooling(), Pooling(label_ids=[1, 2])]),
        "structured_outputs": st.sampled_from([None] * 10 + GRAMMARS),
    }
)
OF_POOLED = {"seed", "max_tokens", "speculative", "pooling", "client", "priority"}
"""what a request with `pooling` may have"""
senders = st.fixed_dictionaries(
    {"client": st.sampled_from(["", "", "a", "b"]), "priority": st.sampled_from([0, 0, 0, -2, 3])}
)
suffixes = st.lists(st.integers(0, 3), max_size=3)
some = st.integers(0, 99)
"""picks one of however many there are"""


class SchedulerMachine(RuleBasedStateMachine):
    """Hypothesis plays the clients, the network and the faults."""

    num_plans = 1
    num_host_slots: st.SearchStrategy[int] = NONE
    num_state_blocks: st.SearchStrategy[int] = NONE
    blocks_per_state: st.SearchStrategy[int] = NONE

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        states = self.num_state_blocks, self.blocks_per_state
        sizes = simulations(self.num_plans, self.num_host_slots, *states)
        self.sim = data.draw(sizes)

    def pick(self, index: int) -> Sequence:
        return self.sim.sequences[index % len(self.sim.sequences)]

    def add(self, prompt: SequenceOf[int], num_given: int, sampling: dict[str, Any]) -> None:
        """Add a request, of which an earlier attempt has generated up to `num_given` tokens."""
        limit, pooling = self.sim.limit, sampling["pooling"]
        if pooling is not None:
            sampling = {name: value for name, value in sampling.items() if name in OF_POOLED}
            num_given = 0
        if len(prompt) + (pooling is None) > limit:
            with pytest.raises(CannotFitError):
                self.sim.add(prompt, **sampling)
            return
        new = make_sequence(prompt, **sampling)
        output, _ = expected_output(prompt, new.sampling, limit, new.is_chat, new.reasoning)
        self.sim.add(prompt, output[:num_given], **sampling)

    @rule(
        base=st.sampled_from(BASES),
        length=st.integers(0, 8) | st.integers(0, 40),
        suffix=suffixes,
        num_copies=st.integers(1, 4),
        num_given=st.integers(-20, 6).map(lambda n: max(0, n)),
        sampling=samplings,
        sender=senders,
    )
    def new_request(
        self,
        base: list[int],
        length: int,
        suffix: list[int],
        num_copies: int,
        num_given: int,
        sampling: dict[str, Any],
        sender: dict[str, Any],
    ) -> None:
        """One, or equal prompts at once."""
        prompt = base[: 1 + length % self.sim.limit] + suffix
        for copy in range(num_copies):
            self.add(prompt, num_given, sampling | {"seed": sampling["seed"] + copy} | sender)

    @rule(length=st.integers(0, 8), chance=st.integers(0, 3))
    def poison(self, length: int, chance: int) -> None:
        """Add a request that kills every worker that runs it."""
        if chance == 3 and length + 1 < self.sim.limit:
            self.sim.add([*BASES[0][:length], POISON])

    @precondition(lambda self: self.sim.sequences)
    @rule(index=some, suffix=suffixes, sampling=samplings)
    def next_turn(self, index: int, suffix: list[int], sampling: dict[str, Any]) -> None:
        """Add a request with the tokens of another one, and more."""
        self.add(self.pick(index).token_ids + suffix, 0, sampling)

    @rule()
    def send(self) -> None:
        self.sim.send()

    @rule(fails=st.booleans())
    def answer(self, fails: bool) -> None:
        """Read files."""
        self.sim.answer(fails)

    @precondition(lambda self: self.sim.has_result)
    @rule()
    def receive(self) -> None:
        self.sim.receive()

    @rule(num_steps=st.integers(1, 8))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.sim.step()

    @precondition(lambda self: self.sim.sequences)
    @rule(index=some, reason=st.sampled_from(["abort", "stop"]))
    def finish(self, index: int, reason: FinishReason) -> None:
        """Whatever state it is in; some end twice."""
        self.sim.finish(self.pick(index), reason)

    @precondition(lambda self: self.sim.scheduler.running)
    @rule(index=some)
    def preempt(self, index: int) -> None:
        running = self.sim.scheduler.running
        self.sim.preempt(running[index % len(running)])

    @rule(holds=st.booleans())
    def hold_grammars(self, holds: bool) -> None:
        """Let the worker compile no grammar, or all that it was sent."""
        self.sim.holds_grammars = holds
        self.sim.compile()

    @rule(num_plans=st.integers(1, 4))
    def change_depth(self, num_plans: int) -> None:
        self.sim.scheduler.max_plans = min(num_plans, self.num_plans)

    @rule(chance=st.integers(0, 7), keeps_memory=st.sampled_from([True, True, False]))
    def restart(self, chance: int, keeps_memory: bool) -> None:
        if chance >= 6:
            self.sim.restart(keeps_memory=keeps_memory)

    @rule(chance=st.integers(0, 7), num_undelivered=st.integers(0, 5), loses_worker=st.booleans())
    def restart_scheduler(self, chance: int, num_undelivered: int, loses_worker: bool) -> None:
        if chance >= 6:
            self.sim.restart_scheduler(num_undelivered, loses_worker)

    @rule(num_stores=st.integers(0, 12))
    def doom_scheduler(self, num_stores: int) -> None:
        """Let it die after some stores to the records."""
        self.sim.life.num_stores = num_stores

    def teardown(self) -> None:
        if hasattr(self, "sim"):
            self.sim.run()


class AmpleMachine(SchedulerMachine):
    """Nothing is evicted: the worker asserts that no block is computed twice."""

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        num_plans = data.draw(st.sampled_from([1, 2, 4]))
        self.num_plans = num_plans
        self.sim = Simulation(
            num_blocks=1200,
            max_model_len=40,
            computes_once=True,
            max_num_seqs=data.draw(st.integers(1, 6)),
            max_num_batched_tokens=data.draw(st.integers(1, 32)),
            num_plans_in_flight=num_plans,
            keeps_memory=data.draw(st.booleans()),
            **data.draw(timed),
        )


@pytest.fixture(autouse=True)
def _guesses_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one equal token, also where guesses are wrong: most are in a random text."""
    monkeypatch.setattr(state_blocks, "STATE_CHUNK", 4)
    monkeypatch.setattr(draft_scheduler, "TOKENS_READ_PER_PLAN", 16)
    for name, number in {"SHORT": 1, "LONG": 2, "MAX_REQUIRED": 2}.items():
        monkeypatch.setattr(ngram_lookup, name, number)


@pytest.fixture(autouse=True)
def _tries_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that no try is skipped which would have found enough blocks; hash in small pieces."""
    monkeypatch.setattr(scheduler, "BLOCKS_PER_PLAN", 3)
    may_fit = BlockManager._may_fit

    def checked(blocks: BlockManager, sequence: Sequence, least: int) -> bool:
        result = may_fit(blocks, sequence, least)
        tier = blocks.pool.offload
        if not result and not (tier and tier.is_awaited(sequence.awaited)):
            number = blocks._num_matchable(sequence)
            cached = blocks.pool.match(blocks._lookups(sequence, 0, number))
            num_needed = -(-len(sequence.token_ids) // blocks.block_size)
            num_new = max(num_needed, number) - len(cached)  # wrong drafts may have kept blocks
            reserved = blocks.states is None or blocks.states.reserve(is_alone=True)
            assert not reserved or blocks.pool.num_free_without(cached) - num_new < least
            if blocks.states and reserved:
                blocks.states.cancel()
        return result

    monkeypatch.setattr(BlockManager, "_may_fit", checked)


@pytest.mark.search
@pytest.mark.timeout(3600)
def test_every_block_is_computed_once() -> None:
    profile = settings(settings.get_profile("scheduler"), stateful_step_count=20)
    run_state_machine_as_test(AmpleMachine, settings=profile)


@pytest.mark.search
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_plans", [1, 2, 4])
def test_scheduler_against_reference(num_plans: int) -> None:
    machine = type(f"Machine{num_plans}", (SchedulerMachine,), {"num_plans": num_plans})
    run_state_machine_as_test(machine, settings=settings.get_profile("scheduler"))


class StateMachine(SchedulerMachine):
    """A model with recurrent state, whose worker often dies in mid-step and keeps its memory."""

    num_host_slots = st.sampled_from([0, 0, 2, 5, 12, 60])
    num_state_blocks = st.integers(2, 4) | st.integers(2, 24)
    blocks_per_state = st.sampled_from([0, 1, 2, 3, 7])

    @rule(
        base=st.sampled_from(BASES),
        length=st.integers(1, 40),
        seed=st.integers(0, 2),
        num_steps=st.integers(2, 8),
        num_ahead=st.integers(0, 3),
    )
    def die_in_a_step(
        self, base: list[int], length: int, seed: int, num_steps: int, num_ahead: int
    ) -> None:
        """Let the worker die while requests decode that would go on."""
        for number in range(2):
            sampling = {"pooling": None, "ignore_eos": True, "seed": seed + number}
            self.add(base[number : length + number], 0, sampling)
        for _ in range(num_steps):
            self.sim.step()
        for _ in range(num_ahead):
            self.sim.send()
        self.sim.restart(keeps_memory=True)


@pytest.mark.search
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_plans", [1, 2, 4])
def test_recurrent_state_against_reference(num_plans: int) -> None:
    machine = type(f"StateMachine{num_plans}", (StateMachine,), {"num_plans": num_plans})
    run_state_machine_as_test(machine, settings=settings.get_profile("scheduler"))
