"""The costs of steps, learned from data, and the tokens of prompts that a step has time for."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.services.scheduler.step_costs import (
    FIRST_TOKENS,
    LEAST_TOKENS,
    MANY,
    MAX_SECONDS,
    MIN_TIMES,
    SHARE,
    TIMES,
    StepCosts,
    StepShape,
)

MOST = 1 << 14
"""tokens of a step, whatever its time"""


class Machine:
    """A machine whose steps take a number of milliseconds for each part."""

    def __init__(
        self,
        decoding: float,
        token: float,
        key: float,
        logits: float,
        constant: float = 5.0,
        sizes: tuple[int, ...] = (),
    ) -> None:
        """Steps with chunks are padded to the next of `sizes`, if there is any."""
        self.costs = constant, decoding, token, key, logits
        self.sizes = sizes

    def seconds(self, shape: StepShape) -> float:
        number = shape.num_decoding + shape.num_tokens
        padded = next((size for size in self.sizes if size >= number and shape.num_tokens), number)
        tokens = padded - shape.num_decoding
        numbers = 1, shape.num_decoding, tokens, shape.num_keys, shape.num_logits
        return sum(cost * n for cost, n in zip(self.costs, numbers, strict=True)) / 1000


def decode(costs: StepCosts, machine: Machine, num_decoding: int) -> None:
    """Measure a step that only decodes."""
    costs.begin(shape := StepShape(), num_decoding, num_decoding)
    costs.measure(shape, machine.seconds(shape))


def prefill(
    costs: StepCosts,
    machine: Machine,
    begin: int = 0,
    num_decoding: int = 4,
    has_logits: bool = False,
) -> StepShape:
    """Return a step with the longest chunk that it has time for, after it was measured."""
    costs.begin(shape := StepShape(), num_decoding, num_decoding)
    number = min(MOST, costs.most_tokens(shape, begin, has_logits))
    shape.add_chunk(begin, begin + number, has_logits)
    costs.measure(shape, machine.seconds(shape))
    return shape


def learn(costs: StepCosts, machine: Machine, num_steps: int = 40, begin: int = 0) -> None:
    for _ in range(num_steps):
        decode(costs, machine, 4)
        prefill(costs, machine, begin)


def test_without_measurements_there_is_no_limit() -> None:
    costs = StepCosts(0.02)
    costs.begin(shape := StepShape(), 4, 4)
    for seconds in (0.0, -1.0, math.nan, math.inf, 1e300):
        costs.measure(shape, seconds)
    assert costs.most_tokens(shape, 0, True) == MANY


def test_a_new_machine_gets_short_chunks_which_double() -> None:
    """Rows of logits begin with few, too, although tokens are known."""
    costs, machine = StepCosts(), Machine(0.1, 0.001, 0, 0.001)
    decode(costs, machine, 4)
    found = [prefill(costs, machine).num_tokens for _ in range(5)]
    assert found == [FIRST_TOKENS * 2**number for number in range(5)]
    found = [prefill(costs, machine, has_logits=True).num_logits for _ in range(3)]
    assert found == [FIRST_TOKENS * 2**number for number in range(3)]
    costs.forget_sizes()  # the worker died
    assert prefill(costs, machine).num_tokens == FIRST_TOKENS


@pytest.mark.parametrize(
    ("machine", "target"),
    [
        (Machine(0.05, 0.03, 2e-6, 0.005), 0.02),
        (Machine(0.05, 0.03, 2e-6, 0.005), 0.05),
        (Machine(0.4, 0.3, 1e-5, 10.0, constant=2.0), 0.1),
    ],
)
def test_a_step_stays_within_the_target(machine: Machine, target: float) -> None:
    """At the end of a long prompt, too, where a token attends to more keys."""
    costs = StepCosts(target)
    learn(costs, machine)
    position, seconds = 0, []
    while position < 60_000:
        shape = prefill(costs, machine, position)
        seconds.append(machine.seconds(shape))
        position += shape.num_tokens
    assert max(seconds) <= target
    assert sum(seconds) / len(seconds) > 0.8 * target, "the time is used"


SIZES = 64, 128, 256, 512, 1024


@pytest.mark.parametrize(("target", "size"), [(0.02, 512), (0.0135, 256)])
def test_a_chunk_fills_the_size_to_which_its_step_is_padded(target: float, size: int) -> None:
    """Steps of 256 tokens take 10.5 ms, those of 512 take 15.8."""
    machine = Machine(0.05, 0.02, 1e-6, 0.005, sizes=SIZES)
    costs = StepCosts(target)
    costs.sizes = [*SIZES]
    learn(costs, machine, 60)
    shapes = [prefill(costs, machine, num_decoding=number) for number in (4, 8, 20)]
    assert [shape.num_tokens + shape.num_decoding for shape in shapes] == [size] * 3
    costs.begin(shape := StepShape(), 4, 4)
    shape.add_chunk(0, size // 2, False)
    assert costs.most_tokens(shape, 0, False) == size // 2 - 4, "what the first chunk leaves"


def test_keys_take_time_in_a_padded_step() -> None:
    machine = Machine(0.05, 0.02, 5e-6, 0.005, sizes=SIZES)
    costs = StepCosts(0.02)
    costs.sizes = [*SIZES]
    learn(costs, machine, 100, begin=50_000)
    shapes = [prefill(costs, machine, 50_000) for _ in range(5)]
    assert max(map(machine.seconds, shapes)) <= 0.02
    assert min(shape.num_tokens for shape in shapes) > 25
    assert max(shape.num_tokens for shape in shapes) < 64 - 4


def test_a_chunk_fills_tiles_whose_keys_take_the_time() -> None:
    """65 tokens would take as long as 128."""
    costs = StepCosts(0.02)
    costs.sizes, costs.tiles = [*SIZES], [64, 128]
    machine = Machine(0.05, 0.002, 1.5e-6, 0.005, sizes=SIZES)
    found = []
    for begin in (10_000, 20_000, 40_000, 80_000):
        learn(costs, machine, 100, begin=begin)
        shape = prefill(costs, machine, begin)
        found.append(shape.num_tokens)
        assert machine.seconds(shape) <= 0.02 or shape.num_tokens == 64
    assert found == [640, 384, 128, 64]
    costs.sizes = []  # without CUDA graphs
    costs.begin(shape := StepShape(), 4, 4)
    assert costs.most_tokens(shape, 20_000, False) == 384
    costs.begin(shape := StepShape(), 4, 4)
    shape.add_chunk(1000, 1065, False)
    shape.add_chunk(1000, 1200, False)
    shape.add_chunk(70_000, 70_001, False)
    assert shape.num_keys == 128 * 1064 + 256 * 1128 + 70_000


def test_the_smallest_step_shows_how_long_decoding_takes() -> None:
    """Also on a GPU, where it is a tile, and if prompts come without a pause from the start."""
    for tiles in ([], [64, 128]):
        costs, machine = StepCosts(), Machine(0.1, 0.02, 1e-6, 0.005, sizes=SIZES)
        costs.sizes, costs.tiles, costs.is_timed = [*SIZES], tiles, True
        found = [prefill(costs, machine).num_tokens for _ in range(12)]
        assert max(found) > 1000


def test_longer_steps_than_the_largest_size_are_not_padded() -> None:
    machine = Machine(0.05, 0.02, 0, 0.005, sizes=SIZES)
    costs = StepCosts(0.1)
    costs.sizes = [*SIZES]
    learn(costs, machine, 60)
    shape = prefill(costs, machine)
    assert 2 * SIZES[-1] < shape.num_tokens
    assert 0.8 * SHARE * 0.1 < machine.seconds(shape) < 1.01 * SHARE * 0.1


def test_prompt_logprobs_do_not_lengthen_steps() -> None:
    """At 10 ms a row of logits, 2,000 rows would take 20 s."""
    costs, machine = StepCosts(), Machine(0.4, 0.3, 1e-5, 10.0)
    learn(costs, machine)
    before, number, seconds = prefill(costs, machine).num_tokens, 0, []
    while number < 2000:
        shape = prefill(costs, machine, number, has_logits=True)
        number += shape.num_tokens
        seconds.append(machine.seconds(shape))
    assert max(seconds) < 1.1 * MAX_SECONDS
    assert prefill(costs, machine).num_tokens > 0.9 * before > 500, "others are as fast as before"


def test_a_slow_machine_gets_short_chunks_and_always_some() -> None:
    slow = Machine(0, 200, 0, 0)
    costs = StepCosts()
    learn(costs, slow)
    assert prefill(costs, slow).num_tokens == LEAST_TOKENS
    hybrid = StepCosts(0.001, least_tokens=128)
    learn(hybrid, slow)
    assert prefill(hybrid, slow).num_tokens == 128
    gpu = StepCosts(0.001)
    gpu.tiles = [64, 128]
    learn(gpu, slow)
    assert prefill(gpu, slow).num_tokens == 64, "a tile: fewer would take as long"


def test_a_machine_that_decodes_slowly_has_longer_steps() -> None:
    """Otherwise it would compute little of prompts."""
    costs, machine = StepCosts(), Machine(0, 1, 0, 0, constant=400)
    learn(costs, machine)
    seconds = machine.seconds(prefill(costs, machine))
    assert 0.9 * MIN_TIMES * 0.4 < seconds < 1.01 * MIN_TIMES * 0.4


@pytest.mark.parametrize("decodes", [True, False])
def test_without_a_target_chunks_take_many_times_as_long_as_decoding(decodes: bool) -> None:
    """Also if all steps have chunks: a short one shows how long decoding takes."""
    costs, machine = StepCosts(), Machine(0.5, 0.3, 1e-5, 0)
    for _ in range(40):
        if decodes:
            decode(costs, machine, 4)
        shapes = [prefill(costs, machine, begin) for begin in (0, 1000)]
    decoding = 0.007 if decodes else 0.007 + LEAST_TOKENS * 0.0003
    for shape in shapes:
        assert 0.9 < machine.seconds(shape) / (TIMES * decoding) < 1.05


def test_without_streams_the_target_does_not_count() -> None:
    costs, machine = StepCosts(0.02), Machine(0.05, 0.03, 0, 0)
    learn(costs, machine, 100)
    costs.begin(shape := StepShape(), 0, 0)
    assert costs.most_tokens(shape, 0, False) > prefill(costs, machine).num_tokens


def test_a_step_that_was_late_changes_little() -> None:
    """The machine was paused for a minute."""
    costs, machine = StepCosts(0.02), Machine(0.05, 0.03, 0, 0)
    learn(costs, machine)
    before = prefill(costs, machine).num_tokens
    costs.begin(shape := StepShape(), 4, 4)
    shape.add_chunk(0, before, False)
    costs.measure(shape, 60.0)
    costs.begin(shape := StepShape(), 4, 4)
    costs.measure(shape, 60.0)
    learn(costs, machine, 30)
    assert before * 0.8 < prefill(costs, machine).num_tokens <= before * 1.2


def test_a_machine_that_was_slow_is_used_again() -> None:
    """Also while prompts keep coming, so that no step only decodes."""
    costs, machine = StepCosts(0.05), Machine(0.05, 0.03, 0, 0)
    learn(costs, machine)
    for _ in range(40):
        decode(costs, Machine(0, 0, 0, 0, constant=200), 4)
    assert prefill(costs, machine).num_tokens == LEAST_TOKENS
    seconds = [machine.seconds(prefill(costs, machine)) for _ in range(60)]
    assert max(seconds) <= 0.05
    assert seconds[-1] > 0.04


costs_of_machines = st.builds(
    Machine,
    decoding=st.floats(0, 1),
    token=st.floats(0.001, 10),
    key=st.floats(0, 1e-3),
    logits=st.floats(0, 20),
    constant=st.floats(0.1, 50),
    sizes=st.sampled_from([(), SIZES]),
)


@settings(settings.get_profile("scheduler"))
@given(
    machine=costs_of_machines,
    target=st.sampled_from([0.0, 0.01, 0.1]),
    steps=st.lists(
        st.tuples(st.integers(0, 64), st.integers(0, 100_000), st.booleans()), max_size=30
    ),
    at=st.integers(0, 100_000),
)
def test_more_work_never_leaves_more_time(
    machine: Machine, target: float, steps: list[tuple[int, int, bool]], at: int
) -> None:
    costs = StepCosts(target)
    costs.sizes = [*machine.sizes]
    decode(costs, machine, 4)
    for num_decoding, begin, has_logits in steps:
        prefill(costs, machine, begin, num_decoding, has_logits)
    costs.begin(shape := StepShape(), 4, 4)
    most = costs.most_tokens(shape, at, False)
    assert most >= LEAST_TOKENS
    assert most >= costs.most_tokens(shape, at + 1000, False)
    assert most >= costs.most_tokens(shape, at, True)
    shape.add_chunk(at, at + min(most, MOST), False)
    if LEAST_TOKENS < most <= MOST:
        assert costs.seconds(shape) <= shape.limit * (1 + 1e-9)
    left = costs.most_tokens(shape, at, False)
    assert left <= max(0, most - 1)


@settings(settings.get_profile("scheduler"))
@given(
    machine=costs_of_machines,
    target=st.floats(0.01, 0.5),
    begin=st.sampled_from([0, 1000, 50_000]),
)
@example(Machine(0.0, 0.875, 0.0, 0.0, 1.0, (64, 128, 256, 512, 1024)), 0.1875, 50_000)
def test_what_was_learned_fits_the_machine(machine: Machine, target: float, begin: int) -> None:
    """Chunks at one position take the share of the target, or are as short or long as can be.

    With padding, one in four may try a size that takes longer.
    """
    costs = StepCosts(target)
    costs.sizes = [*machine.sizes]
    learn(costs, machine, 150, begin)
    shapes = [prefill(costs, machine, begin) for _ in range(20 if machine.sizes else 1)]
    chosen = sorted(shapes, key=machine.seconds)[3 * (len(shapes) - 1) // 4]
    if 2 * LEAST_TOKENS < chosen.num_tokens < MOST:
        least = 0.0 if machine.sizes else 0.6
        assert least * SHARE * target <= machine.seconds(chosen) <= 1.2 * SHARE * target
