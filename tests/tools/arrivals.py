"""When prompts get their first tokens under `--target-itl-ms 20`, by the scheduler alone.

`python -m tests.tools.arrivals --seeds 1 2 3`: prompts of 1,024 tokens ± 50 %, one in ten of 8,192,
come at 12 a second; answers have 256 tokens ± 50 %. Steps take as long as they would with 8B on an
H200 if this model of their cost were right; no tokens are computed. Prints milliseconds for each
seed: p50 and p99 of short prompts, then of long ones.

`--rate 24500 --seconds 4000`: of a queue of prompts alone, which are computed at this number of
tokens a second. First with short prompts first, then with long ones first. No order gives a kind of
prompts its first tokens earlier.
"""

import argparse
import random
from heapq import heappop, heappush
from unittest.mock import patch

from penstock.services.scheduler.sequence import Sequence
from penstock.services.scheduler.step_costs import StepShape
from tests.services.scheduler.builders import long_prompt
from tests.services.scheduler.simulation import Simulation

SIZES = {"num_blocks": 9000, "block_size": 64, "max_model_len": 9000, "max_num_seqs": 256}
OPTIONS = {"max_num_batched_tokens": 2048, "num_plans_in_flight": 1, "target_itl_ms": 20}
FIRST = 2_000_000  # token of a prompt; a smaller one is poison for the reference worker
NUM_LEARNING = 60  # requests that do not count: the scheduler learns what steps cost


def machine(shape: StepShape) -> float:
    """Return the seconds of a step."""
    chunks = 0.15 * (shape.num_tokens > 0) + 0.0245 * shape.num_tokens + 5e-7 * shape.num_keys
    return (5.3 + 0.02 * shape.num_decoding + chunks) / 1000


def arrivals(seed: int, seconds: float) -> list[tuple[float, int, int]]:
    """Return times, and numbers of prompt and output tokens."""
    draw, now, found = random.Random(seed), 0.0, []
    while now < seconds:
        now += draw.expovariate(12)
        is_long = draw.random() < 0.1
        num_prompt = 8192 if is_long else draw.randint(512, 1536)
        found.append((now, num_prompt, draw.randint(128, 384)))
    return found


def first_tokens(seed: int, seconds: float) -> list[tuple[int, float]]:
    """Return the length of each prompt, and the milliseconds until its first token."""
    sim = Simulation(machine=machine, **SIZES, **OPTIONS)  # type: ignore[arg-type]
    coming = [*reversed(arrivals(seed, seconds))]
    waiting: dict[Sequence, tuple[float, int]] = {}
    running: list[Sequence] = []
    now, found, number = 0.0, [], 0
    while coming or waiting or running:
        if not (waiting or running):
            now = max(now, coming[-1][0])
        while coming and coming[-1][0] <= now:
            time, num_prompt, num_out = coming.pop()
            number += 1
            prompt = long_prompt(num_prompt, FIRST + 10_000 * number)
            sequence = sim.add(prompt, max_tokens=num_out, ignore_eos=True)
            waiting[sequence] = time, num_prompt
            running.append(sequence)
        num_steps = len(sim.shapes)
        sim.step()
        now += sum(map(machine, sim.shapes[num_steps:]))
        for sequence, (time, num_prompt) in [*waiting.items()]:
            if len(sequence.token_ids) > num_prompt:
                found.append((num_prompt, 1000 * (now - time)))
                del waiting[sequence]
        running = [sequence for sequence in running if not sequence.finish_reason]
    return found[NUM_LEARNING:]


def in_one_order(
    seed: int, seconds: float, rate: float, long_first: bool
) -> list[tuple[int, float]]:
    """Return what `first_tokens` does, of a queue whose prompts interrupt those that come later."""
    coming = [*reversed(arrivals(seed, seconds))]
    queue: list[tuple[bool, float, int, float]] = []  # order, arrival, tokens, tokens left
    now, found = 0.0, []
    while coming or queue:
        if not queue:
            now = coming[-1][0]
        while coming and coming[-1][0] <= now:
            time, num_prompt, _ = coming.pop()
            heappush(queue, ((num_prompt > 1536) != long_first, time, num_prompt, num_prompt))
        order, time, num_prompt, left = heappop(queue)
        end = now + left / rate
        if coming and coming[-1][0] < end:
            left -= (coming[-1][0] - now) * rate
            now = coming[-1][0]
            heappush(queue, (order, time, num_prompt, left))
        else:
            now = end
            found.append((num_prompt, 1000 * (now - time)))
    return found


def show(name: int | str, found: list[tuple[int, float]]) -> None:
    kinds = [sorted(ms for length, ms in found if (length > 1536) == kind) for kind in (0, 1)]
    figures = [some[int(share * len(some))] for some in kinds for share in (0.5, 0.99)]
    print(name, *map(round, figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6])
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--rate", type=float, help="prompt tokens a second of a queue alone")
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        if rate := arguments.rate:
            for long_first in (False, True):
                show(seed, in_one_order(seed, arguments.seconds, rate, long_first))
            continue
        with patch.object(Simulation, "check"):  # which takes most of the time
            show(seed, first_tokens(seed, arguments.seconds))


if __name__ == "__main__":
    main()
