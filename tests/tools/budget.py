"""Tokens that one memory for KV and recurrent state saves, by the scheduler alone.

`python -m tests.tools.budget`: conversations with 27B in 70 GiB, once with memory for three states
of each of 64 rows, at most a half (as before), and once with places that both kinds share. All
tokens are divided by 16, with blocks of 8 tokens instead of 128. Prints the prompts' tokens, how
many of them were computed, and the steps. Then in 11 GiB, how many sequences run on average: short
requests after eight long answers side by side, of which seven have ended.

`python -m tests.tools.budget agent`: 40 turns of an agent with tool results, to 100,000 tokens,
with the real sizes, and answers of 20, 60 and 200 tokens. Prints the tokens of all prompts, how
many were computed, how many of these had been part of an earlier prompt, and those of answers.
"""

import random
import sys
from collections import deque
from itertools import product
from typing import NamedTuple
from unittest.mock import patch

from penstock.services.scheduler.blocks import state_blocks
from penstock.services.scheduler.sequence import Sequence
from tests.services.scheduler.builders import long_prompt
from tests.services.scheduler.reference import EOS, ReferenceWorker
from tests.services.scheduler.simulation import Simulation

MEMORY, STATE, BLOCK, PLACE = 70 << 10, 165, 8, 192  # MiB
ROWS = 64
ASK = 3, 4, 5  # for an answer


class Load(NamedTuple):
    """Conversations; tokens are drawn from half to three halves of the given numbers."""

    conversations: int
    turns: int
    at_once: int
    message: int  # tokens that each turn adds to the prompt
    answer: int = 30


LOADS = {
    "6 of long documents": Load(6, 12, 4, 900),
    "12 agents": Load(12, 20, 12, 200),
    "30 agents": Load(30, 20, 16, 200),
    "200 short chats": Load(200, 4, 48, 40),
}


def simulation(is_shared: bool, memory: int = MEMORY) -> Simulation:
    options = {"block_size": 8, "max_model_len": 16000, "max_num_seqs": ROWS}
    options |= {"max_num_batched_tokens": 256, "num_plans_in_flight": 1}
    if is_shared:
        places = {"num_state_blocks": memory // PLACE - 1, "blocks_per_state": PLACE // BLOCK}
        return Simulation(**places, **options)  # type: ignore[arg-type]
    states = min(3 * ROWS, memory // 2 // STATE - 1)
    sizes = {"num_state_blocks": states, "num_blocks": (memory - (states + 1) * STATE) // BLOCK}
    return Simulation(**sizes, **options)  # type: ignore[arg-type]


def converse(sim: Simulation, load: Load) -> tuple[int, int, int]:
    """Return the prompts' tokens, how many of them were computed, and the number of steps."""
    draw = random.Random(1)

    def around(number: int) -> int:
        return draw.randint(number // 2, 3 * number // 2)

    texts: list[list[int]] = [[] for _ in range(load.conversations)]
    turns = deque(index for _ in range(load.turns) for index in range(load.conversations))
    running: dict[Sequence, int] = {}  # with the number of the conversation
    given = computed = steps = 0
    while turns or running:
        while turns and len(running) < load.at_once and turns[0] not in running.values():
            index = turns.popleft()
            text = texts[index]
            # smaller tokens are poison for the reference worker
            text += [draw.randrange(2 * 10**6, 10**7) for _ in range(around(load.message))] + [EOS]
            sequence = sim.add([*text], max_tokens=around(load.answer), ignore_eos=True)
            running[sequence] = index
            given += len(text)
        sim.step()
        steps += 1
        for sequence in [sequence for sequence in running if sequence.finish_reason]:
            text = texts[running.pop(sequence)]
            computed += len(text) - sequence.num_cached_tokens
            text += sequence.output_token_ids
        sim.sequences[:] = running
    return given, computed, steps


def crowd(sim: Simulation) -> float:
    """Return how many sequences run on average after seven of eight long ones have ended."""
    draw = random.Random(1)

    def ask(number: int, answer: int) -> Sequence:
        tokens = [draw.randrange(2 * 10**6, 10**7) for _ in range(number)]
        return sim.add(tokens, max_tokens=answer, ignore_eos=True)

    last, *others = [ask(32, 10_000), *(ask(32, 1200) for _ in range(7))]
    while not all(sequence.finish_reason for sequence in others):
        sim.step()
    short = [ask(16, 16) for _ in range(200)]
    running = []
    while not all(sequence.finish_reason for sequence in short):
        sim.step()
        running.append(len(sim.scheduler.running))
    assert not last.finish_reason
    return sum(running) / len(running)


def agent(answer: int, block_size: int) -> tuple[int, int, int, int]:
    """Return the tokens of prompts, computed, computed again, and of answers."""
    sizes = {"num_blocks": 280_000 // block_size, "num_state_blocks": 60, "block_size": block_size}
    options = {"max_model_len": 140_000, "max_num_batched_tokens": 2048, "num_plans_in_flight": 1}
    sim, draw, turns = Simulation(**sizes, **options), random.Random(1), 40  # type: ignore[arg-type]
    given = computed = again = num_known = 0
    text = [*long_prompt(3000, 2 * 10**6), EOS]
    for turn in range(turns):
        number = draw.randint(1200, 3600) - answer
        text += [*long_prompt(number, 3 * 10**6 + 10_000 * turn), EOS, *ASK]
        sequence = sim.add([*text], max_tokens=1)
        sim.run()
        given, computed = given + len(text), computed + len(text) - sequence.num_cached_tokens
        again += max(0, num_known - sequence.num_cached_tokens)
        num_known = len(text)
        text += [*long_prompt(answer, 9 * 10**6 + 1000 * turn), EOS]
    return given, computed, again, turns * answer


def main() -> None:
    with patch.object(Simulation, "check"):
        for answer, block_size in product((20, 60, 200), (64, 128)) if "agent" in sys.argv else ():
            print(f"answers of {answer:3}, blocks of {block_size:3}", *agent(answer, block_size))
    if "agent" in sys.argv:
        return
    sizes = {"STATE_CHUNK": 8, "MIN_SAVED": 64, "MAX_MESSAGE": 512}
    checks = patch.object(Simulation, "check"), patch.object(ReferenceWorker, "_read")
    with patch.multiple(state_blocks, **sizes), checks[0], checks[1]:
        for name, load in LOADS.items():
            for is_shared in (False, True):
                found = converse(simulation(is_shared), load)
                print(f"{name:20} {'one budget' if is_shared else 'apart':10}", *found, flush=True)
        for is_shared in (False, True):
            number = crowd(simulation(is_shared, 11 << 10))
            kind = "one budget" if is_shared else "apart"
            print(f"{'200 after 8 long':20} {kind:10} {number:.1f} run", flush=True)


if __name__ == "__main__":
    main()
