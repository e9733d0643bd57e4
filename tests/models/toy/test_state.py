"""A model with recurrent state gives the same tokens whatever happens to its sequences."""

from collections import deque
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random

import pytest
import torch

from penstock.protocol.checkpoint import read_model_config
from penstock.protocol.config import Config
from penstock.protocol.messages.packed import unpack
from penstock.protocol.messages.plan import BatchPlan
from penstock.protocol.messages.sampling import SamplingParams
from penstock.services.worker.launched_step import LaunchedStep, StepOutput
from penstock.services.worker.memory.state_memory import kept_states
from tests.engine import Engine
from tests.models.hybrid import save_hybrid
from tests.models.toy.family import PARALLEL, registered
from tests.models.toy.model import save_checkpoint
from tests.models.toy.plain import generate

NUM_OUT = 24


@pytest.fixture(scope="module", autouse=True)
def families() -> Iterator[None]:
    with registered():
        yield


@pytest.fixture(scope="module", params=["toy", "Qwen3.5"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    if request.param == "toy":
        return save_checkpoint(folder)
    save_hybrid(folder)
    return folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Prompts with common beginnings, some of which repeat themselves."""
    random = Random(1)
    first, second = ([random.randrange(1, 264) for _ in range(200)] for _ in range(2))
    repeats = [*second[:20] * 6, *first[:3]]
    lengths = [first[:n] for n in (1, 63, 64, 65, 128, 129, 200)]
    branches = [[*first[:n], *second[:30]] for n in (64, 100, 130)]
    return [*lengths, second, *branches, repeats, [*repeats, *second[:7]]]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    return plain(folder, prompts)


def plain(folder: Path, prompts: list[list[int]], num_out: int = NUM_OUT) -> list[list[int]]:
    """Return the tokens of a plain loop; of Qwen3.5 those of an engine with one request a time."""
    if not read_model_config(folder).is_hybrid:
        return [generate(folder, prompt, num_out) for prompt in prompts]
    engine = engine_of(folder, enable_prefix_caching=False)
    return [outputs(engine, [prompt], num_out)[0] for prompt in prompts]


def engine_of(folder: Path, **options: object) -> Engine:
    given = {"device": "cpu", "num_threads": 1, "block_size": 16, "kv_cache_gib": 0.02} | options
    return Engine(Config(model=str(folder), **given))  # type: ignore[arg-type]


def outputs(
    engine: Engine, prompts: list[list[int]], num_out: int = NUM_OUT, **run: object
) -> list[list[int]]:
    """Return the likeliest tokens."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)
    sequences = [engine.add(f"{n}", prompt, sampling) for n, prompt in enumerate(prompts)]
    engine.run(**run)  # type: ignore[arg-type]
    return [sequence.output_token_ids for sequence in sequences]


def test_a_family_without_state(tmp_path: Path, prompts: list[list[int]]) -> None:
    """A family by the recipe of CONTRIBUTING.md: attention and SwiGLU have the same input."""
    folder = save_checkpoint(tmp_path, architectures=[PARALLEL])
    expected = [generate(folder, prompt, NUM_OUT) for prompt in prompts]
    scarce = {"num_blocks": 16, "max_num_seqs": 6, "max_num_batched_tokens": 70}
    engine = engine_of(folder, speculative_method="ngram", **scarce)
    assert outputs(engine, prompts) == expected
    assert engine.scheduler.num_preemptions
    engine = engine_of(folder)
    assert engine.scheduler.block_manager.states is None
    for _ in range(2):  # the second time with a full prefix cache
        assert outputs(engine, prompts) == expected


def num_state_blocks_in_use(engine: Engine) -> int:
    states = engine.scheduler.block_manager.states
    assert states
    return states.pool.num_blocks - states.pool.num_free_blocks


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"enable_prefix_caching": False}, id="plain"),
        pytest.param({}, id="prefix cache"),
        pytest.param({"max_num_seqs": 3, "max_num_batched_tokens": 70}, id="chunks"),
        pytest.param({"num_blocks": 16, "max_num_seqs": 8}, id="preemption"),
        pytest.param({"speculative_method": "ngram"}, id="drafts"),
        pytest.param(
            {
                "speculative_method": "ngram",
                "num_speculative_tokens": 12,
                "num_blocks": 16,
                "max_num_seqs": 6,
                "max_num_batched_tokens": 70,
            },
            id="all",
        ),
        pytest.param(
            {
                "speculative_method": "ngram",
                "num_blocks": 16,
                "max_num_seqs": 3,
                "max_num_batched_tokens": 80,
                "kv_offload_gib": 0.1,
            },
            id="host tier",
        ),
    ],
)
def test_the_tokens_of_a_plain_loop(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], options: dict[str, object]
) -> None:
    engine = engine_of(folder, **options)
    for _ in range(2):  # the second time with a full prefix cache
        assert outputs(engine, prompts) == expected
    assert num_state_blocks_in_use(engine) == 0
    if offload := engine.scheduler.block_manager.offload:
        assert offload.num_loaded
    if "num_blocks" in options:
        assert engine.scheduler.num_preemptions
    if "speculative_method" in options and not engine.model.is_hybrid:
        drafts = engine.scheduler.draft_scheduler
        assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_preempted_sequences_continue_with_a_host_tier(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], method: str
) -> None:
    options = {"num_blocks": 16, "max_num_seqs": 6, "max_num_batched_tokens": 80}
    engine = engine_of(folder, speculative_method=method, kv_offload_gib=0.1, **options)
    for _ in range(2):
        assert outputs(engine, prompts) == expected
    assert engine.scheduler.num_preemptions > 3
    # of a prompt of 160 tokens that has no output yet, and ends between two chunks of a prompt
    assert engine.scheduler.num_recomputed_tokens <= 32


def scarce_engine(folder: Path, prompts: list[list[int]], more: int, **options: object) -> Engine:
    """Return an engine with few places for KV or states, which hold no numbers yet.

    more: places beyond those of the longest prompt.
    """
    options["max_num_seqs"] = 6
    ample = engine_of(folder, **options)
    num_bytes = sum(tensor.nbytes for tensor in ample.runner.kv.tensors)
    place_bytes = num_bytes / (ample.runner.num_state_blocks + 1)
    size = ample.runner.blocks_per_state * ample.runner.block_size
    num_places = 2 + -(-(max(map(len, prompts)) + NUM_OUT) // size) + more
    gib = (num_places + 1.1) * place_bytes / 2**30
    engine = engine_of(folder, **options | {"kv_cache_gib": gib})
    assert engine.runner.num_state_blocks == num_places
    engine.runner.kv.values.view(torch.uint8).fill_(0xFF)
    return engine


@pytest.mark.parametrize("more", [0, 1, 5])
@pytest.mark.parametrize("host_gib", [0, 0.1])
def test_kv_and_states_have_one_budget(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], more: int, host_gib: float
) -> None:
    """more: places beyond those of the longest prompt."""
    engine = scarce_engine(
        folder, prompts, more, max_num_batched_tokens=70, kv_offload_gib=host_gib
    )
    states = engine.scheduler.block_manager.states
    assert states
    assert not states.pool.num_blocks
    random, length = Random(2), engine.scheduler.block_manager.max_tokens - NUM_OUT
    long = [random.randrange(1, 264) for _ in range(length)]
    of_long = outputs(engine_of(folder), [long])
    for _ in range(2):
        assert outputs(engine, prompts) == expected
        assert states.pool.num_blocks > 2 or more < 5
        assert outputs(engine, [long]) == of_long
        assert states.pool.num_blocks == 2
    assert num_state_blocks_in_use(engine) == 0


def test_a_hit_needs_blocks_and_a_checkpoint(folder: Path) -> None:
    engine = engine_of(folder)
    sampling = SamplingParams(temperature=0.0, max_tokens=1)
    first, other = list(range(1, 151)), list(range(151, 201))
    cached = []
    for name, prompt in [
        ("first", first),  # leaves a checkpoint at 128
        ("equal", first),
        ("branch", first[:100] + other),  # finds 96 tokens of KV, but no checkpoint before 128
        ("equal branch", first[:100] + other),  # has left one at 64, and at 128
        ("other branch", first[:80] + other),
    ]:
        sequence = engine.add(name, prompt, sampling)
        engine.run()
        cached.append(sequence.num_cached_tokens)
    assert cached == [0, 128, 0, 128, 64]


def test_checkpoints_in_the_tiers(folder: Path) -> None:
    """They come back with their blocks."""
    random, sampling = Random(4), SamplingParams(temperature=0.0, max_tokens=9)
    prompts = [[random.randrange(1, 264) for _ in range(140)] for _ in range(8)]

    def answers(engine: Engine, name: str) -> tuple[list[list[int]], list[int]]:
        sequences = []
        for number, prompt in enumerate(prompts):
            sequences.append(engine.add(f"{name} {number}", prompt, sampling))
            engine.run()
        outputs = [sequence.output_token_ids for sequence in sequences]
        return outputs, [sequence.num_cached_tokens for sequence in sequences]

    engine = engine_of(folder, num_blocks=20, kv_offload_gib=0.1, max_num_seqs=2)
    expected, cached = answers(engine, "first")
    assert cached == [0] * 8
    assert answers(engine, "from the host") == (expected, [128] * 8)


class LateSteps:
    """Steps that run when their tokens are asked for, so that plans in flight have not run."""

    def __init__(self, engine: Engine) -> None:
        assert engine.runner.states
        self._states, self._launch = engine.runner.states, engine.runner.launch
        self._waiting: deque[LateStep] = deque()
        engine.runner.launch = self.launch  # type: ignore[method-assign, assignment]

    def launch(self, plan: BatchPlan) -> "LateStep":
        step = LateStep(self, plan)
        self._waiting.append(step)
        return step

    def run(self, until: "LateStep | None" = None, number: int = 100) -> None:
        """Run waiting steps in order, up to a step or a number."""
        while self._waiting and number and (until is None or until.launched is None):
            step = self._waiting.popleft()
            step.launched = self._launch(step.plan)
            number -= 1

    def die(self, random: Random) -> None:
        """Run some of the waiting steps, and a part of another."""
        self.run(number=random.randrange(3))
        positions = self._states.positions.clone()
        self.run(number=1)
        changed = (self._states.positions != positions).any(1)  # others may have KV in their place
        for tensor in (tensor for layer in self._states.layers for tensor in layer):
            tensor[changed] = torch.nan
        self._states.positions[changed] = 0
        self._waiting.clear()


class LateStep:
    def __init__(self, steps: LateSteps, plan: BatchPlan) -> None:
        self._steps, self.plan = steps, plan
        self.launched: LaunchedStep | None = None

    def token_ids(self) -> list[int]:
        self._steps.run(until=self)
        assert self.launched
        return self.launched.token_ids()

    def output(self) -> StepOutput:
        assert self.launched
        return self.launched.output()


def lose_workers(engine: Engine) -> None:
    """Continue with other workers, which have the memory of those that died."""
    scheduler = engine.scheduler
    engine.lose_workers()
    for sequence in scheduler.at_risk:
        sequence.num_deaths = 0  # this is no poison
    scheduler.lose_plans()
    assert engine.runner.states
    numbers = unpack(kept_states(engine.runner.states))
    ranges = list(zip(numbers[::2], numbers[1::2], strict=True))
    scheduler.begin(0, has_memory=True, state_ranges=ranges)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("speculative_method", ["none", "ngram"])
def test_workers_that_die_in_mid_step_and_keep_their_memory(
    folder: Path,
    prompts: list[list[int]],
    expected: list[list[int]],
    seed: int,
    speculative_method: str,
) -> None:
    options = {"max_num_seqs": 6, "max_num_batched_tokens": 90, "num_plans_in_flight": 4}
    engine = engine_of(folder, speculative_method=speculative_method, **options)
    steps = LateSteps(engine)
    random, scheduler = Random(seed), engine.scheduler
    scheduler.max_plans = 2 + seed % 3
    num_deaths = 0

    def disturb() -> None:
        nonlocal num_deaths
        if random.random() < 0.9 or not scheduler.in_flight:
            return
        num_deaths += 1
        steps.die(random)
        lose_workers(engine)

    assert outputs(engine, prompts, between_steps=disturb) == expected
    assert num_deaths > 3
    assert num_state_blocks_in_use(engine) == 0
    if scheduler.max_plans == 2:  # a whole state is at most as old as the oldest of two plans
        assert scheduler.num_recomputed_tokens < num_deaths * options["max_num_batched_tokens"]


def test_workers_that_do_not_know_their_states(
    folder: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    engine = engine_of(folder)
    deaths = iter([False] * 20 + [True])

    def disturb() -> None:
        if next(deaths, False):
            engine.lose_workers()
            engine.scheduler.lose_plans()
            engine.scheduler.begin(0, has_memory=True)
            assert engine.scheduler.num_preemptions

    assert outputs(engine, prompts, between_steps=disturb) == expected
    assert next(deaths, None) is None


def test_sequences_at_a_checkpoint_that_is_hidden_do_not_share_what_they_write(
    folder: Path,
) -> None:
    """A request whose logits are bad hides what it has published, also from its next users."""
    engine, random = engine_of(folder), Random(3)
    prefix, *rests = ([random.randrange(1, 264) for _ in range(n)] for n in (64, 6, 70, 71))
    first = engine.add("first", [*prefix, *rests[0]], SamplingParams(max_tokens=1))
    engine.run()
    prompts = [[*prefix, *rest] for rest in rests[1:]]

    schedule = engine.scheduler.schedule

    def schedule_and_hide() -> BatchPlan | None:
        plan = schedule()
        engine.scheduler.block_manager.unpublish(first)
        return plan

    engine.scheduler.schedule = schedule_and_hide  # type: ignore[method-assign]
    assert outputs(engine, prompts) == plain(folder, prompts)


def test_a_burst_finds_the_prefix_that_its_first_request_computes(folder: Path) -> None:
    """What is left of a step's budget after a chunk admits nobody who could not compute."""
    options = {"max_num_seqs": 24, "max_num_batched_tokens": 200, "num_blocks": 2000}
    engine, random = engine_of(folder, **options), Random(3)
    sampling = SamplingParams(max_tokens=60, ignore_eos=True)
    for number in range(3):  # so that less than a chunk is left beside two chunks
        engine.add(f"decodes {number}", [1, 2, 3], sampling)
    prefix = [random.randrange(1, 264) for _ in range(400)]
    calls, burst = count(), []

    def add_burst() -> None:
        if next(calls) == 3:
            burst.extend(engine.add(f"{n}", [*prefix, n], sampling) for n in range(1, 13))
        assert not any(s.slot >= 0 and not s.num_planned_tokens for s in burst)

    engine.run(add_burst)
    assert [sequence.num_cached_tokens for sequence in burst] == [0, *[384] * 11]


def test_bits_of_logprobs(folder: Path, prompts: list[list[int]]) -> None:
    """The order of arithmetic depends on a token's place in its sequence only."""
    sampling = SamplingParams(seed=1, logprobs=2, max_tokens=NUM_OUT, ignore_eos=True)

    def logprobs(engine: Engine) -> list[object]:
        sequences = [engine.add(f"{n}", prompt, sampling) for n, prompt in enumerate(prompts)]
        engine.run()
        return [sequence.logprobs for sequence in sequences]

    expected = logprobs(engine_of(folder, max_num_seqs=1, enable_prefix_caching=False))
    options = {"max_num_seqs": 6, "max_num_batched_tokens": 70, "num_blocks": 16}
    engine = engine_of(folder, **options)
    for _ in range(2):
        assert logprobs(engine) == expected
    assert engine.scheduler.num_preemptions


def test_sampled_tokens_are_not_found_by_others(folder: Path) -> None:
    """Their keys and values are not those of a prompt, which is computed in chunks."""
    engine, random = engine_of(folder), Random(3)
    prompt = [random.randrange(1, 264) for _ in range(130)]
    sampling = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)
    first = engine.add("first", prompt, sampling)
    engine.run()
    second = engine.add("second", [*first.token_ids, 5, 6, 7], sampling)
    engine.run()
    assert second.num_cached_tokens == 128
