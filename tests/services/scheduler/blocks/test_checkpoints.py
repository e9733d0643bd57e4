"""Places of checkpoints of the recurrent state: what the next requests of a conversation find."""

import random
from itertools import chain

import pytest

from penstock.services.scheduler.blocks import state_blocks
from tests.services.scheduler.builders import long_prompt
from tests.services.scheduler.reference import EOS
from tests.services.scheduler.simulation import Simulation

ASK = [3, 4, 5]  # for an answer, such as `<|im_start|>assistant` and `<think>`
UNIT, SAVED = 4, 16


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_blocks, "STATE_CHUNK", UNIT)
    monkeypatch.setattr(state_blocks, "MIN_SAVED", SAVED)


def conversations() -> Simulation:
    sizes = {"num_blocks": 2000, "num_state_blocks": 200, "max_num_batched_tokens": 64}
    return Simulation(max_model_len=8000, **sizes)  # type: ignore[arg-type]


def computed(sim: Simulation, prompt: list[int]) -> int:
    """Return the tokens of a prompt that are computed. The reference worker checks their state."""
    sequence = sim.add(prompt, max_tokens=1)
    sim.run()
    return len(prompt) - sequence.num_cached_tokens


@pytest.mark.parametrize(("size", "found"), [(SAVED, 16), (SAVED - 1, 0)])
def test_another_last_message_finds_long_messages_before_it(size: int, found: int) -> None:
    """The second request finds them, where the third one would have without messages."""
    sim, before = conversations(), [*long_prompt(size - 1, 10), EOS]
    last, other = ([*long_prompt(8, first), EOS, *ASK] for first in (100, 200))
    assert computed(sim, before + last) == len(before + last)
    assert computed(sim, before + other) == len(before + other) - found


def test_places_of_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of the prompt, and before its last message only."""

    def messages(*sizes: int) -> list[int]:
        texts = [[*long_prompt(size - 1, 10 * size + at), EOS] for at, size in enumerate(sizes)]
        return [*chain.from_iterable(texts), ASK[0]]

    def places(sim: Simulation, *sizes: int) -> set[int]:
        sequence = sim.add(messages(*sizes), max_tokens=1)
        sim.send()
        found = {at for at in sequence.checkpoints if at > sequence.num_cached_tokens}
        sim.run()
        return found

    sim = conversations()
    assert places(sim, 16, 16, 16) == {32, 48}
    assert places(sim, 16, 16, 8, 16) == {56}, "32 are found, and 8 more are not worth one"
    monkeypatch.setattr(state_blocks, "MAX_MESSAGE", 10)
    assert places(conversations(), 16, 16, 16) == {48}
    off = Simulation(num_state_blocks=20, enable_prefix_caching=False, max_model_len=100)
    assert places(off, 16, 16, 16) == set()


@pytest.mark.parametrize("changes", ["nothing", "reasoning", "last answer", "last message"])
def test_forty_turns_of_an_agent_compute_what_is_new(changes: str) -> None:
    """Whatever the client does to the last turn, each request computes little more than new tokens.

    reasoning: earlier answers come without their reasoning, which changes the last token of what
    asked for them, such as the newline after `<think>`. last answer: each is generated twice.
    last message: each is sent in two versions.
    """
    sim, draw = conversations(), random.Random(5)

    def text(least: int, most: int) -> list[int]:
        return [draw.randrange(10, 10**6) for _ in range(draw.randrange(least, most))]

    before, last, asked = [*text(60, 61), EOS], [*text(5, 9), EOS], [[EOS]]
    most_wasted = SAVED + UNIT if changes == "last message" else UNIT
    for _ in range(40):
        prompts = [[*before, *last, *ASK]] * (1 + (changes == "last answer"))
        if changes == "last message":
            prompts.append([*before, *text(4, 9), EOS, *ASK])
        for prompt in prompts:
            known = max(shared(prompt, old) for old in asked)
            assert computed(sim, prompt) <= max(1, len(prompt) - known) + most_wasted
            asked.append(prompt)
        reasoning = [7] if changes == "reasoning" else [ASK[-1], *text(5, 30)]
        before = [*before, *last, *ASK[:-1], *reasoning, *text(2, 12), EOS]
        last = [*text(5, 60), EOS]


def shared(prompt: list[int], other: list[int]) -> int:
    """Return the number of equal first tokens."""
    pairs = enumerate(zip(prompt, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(prompt), len(other)))
