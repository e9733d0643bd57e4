"""Tokens that are guessed change nothing but the number of steps; with the demo model, on a CPU."""

from random import Random

import pytest

from penstock.protocol.config import Config
from penstock.protocol.messages.sampling import SamplingParams
from tests.engine import Engine
from tests.tools.demo.tasks import Sizes, make_example
from tests.tools.demo.texts import random_text

GREEDY = SamplingParams(max_tokens=90)
SAMPLED = SamplingParams(max_tokens=40, temperature=1.0, seed=5, ignore_eos=True)
RANDOM = SamplingParams(max_tokens=40, temperature=2.0, ignore_eos=True)


def requests() -> list[tuple[str, SamplingParams]]:
    """Texts to repeat, where most guesses are right; others, where most are wrong."""
    rng = Random(1)
    repeat = [make_example(rng, "repeat", Sizes(70, 90)).prompt for _ in range(3)]
    texts = [random_text(rng, 60) for _ in range(3)]
    repeat[2] = "repeat: " + 12 * "la la lu "
    return [
        *((prompt, params) for prompt in repeat for params in (GREEDY, SAMPLED)),
        *((text, params) for text in texts for params in (SAMPLED, RANDOM)),
        ("count from 1 to 60", GREEDY),
    ]


class Speculating(Engine):
    """Outputs of `requests`, and the number of steps."""

    def __init__(self, speculative: str, **options: object) -> None:
        defaults = {"device": "cpu", "num_threads": 1, "kv_cache_gib": 0.1, "max_num_seqs": 64}
        super().__init__(Config(speculative_method=speculative, **defaults | options))  # type: ignore[arg-type]

    def outputs(self, *which: tuple[str, SamplingParams]) -> list[list[int]]:
        sequences = [
            self.add(f"{number}", list(prompt.encode()), params)
            for number, (prompt, params) in enumerate(which)
        ]
        self.run()
        return [sequence.output_token_ids for sequence in sequences]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return Speculating("none").outputs(*requests())


@pytest.mark.parametrize(
    "options",
    [
        {"num_speculative_tokens": 32, "num_plans_in_flight": 3, "block_size": 4},
        {"max_num_seqs": 15, "num_plans_in_flight": 1, "max_num_batched_tokens": 40},
    ],
)
def test_the_same_tokens(plain: list[list[int]], options: dict[str, int]) -> None:
    engine = Speculating("ngram", **options)
    assert engine.outputs(*requests()) == plain
    drafts = engine.scheduler.draft_scheduler
    assert 100 < drafts.num_accepted_tokens < drafts.num_draft_tokens


def test_a_text_to_repeat_takes_fewer_steps() -> None:
    engine = Speculating("ngram")
    [output] = engine.outputs(requests()[0])
    assert engine.scheduler.num_steps < len(output) / 2
