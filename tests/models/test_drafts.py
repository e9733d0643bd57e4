"""Rows with extras have drafts, which change neither tokens, logprobs nor finish reasons."""

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.protocol.config import Config
from penstock.protocol.messages.plan import SampledTokens
from penstock.protocol.messages.sampling import SamplingParams
from penstock.protocol.messages.structured import StructuredOutputs
from penstock.services.scheduler.sequence import Sequence
from tests.engine import Engine
from tests.models.toy.test_state import engine_of
from tests.search import diagonal
from tests.tools.demo.tasks import Sizes, make_example

NUM_OUT = 40
THINK_END = 260
ASCII = StructuredOutputs(regex=r"[\x00-\x7f]{8,60}")
OBJECT = StructuredOutputs(
    json={
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 9}, "number": {"type": "integer"}},
        "required": ["city", "number"],
        "additionalProperties": False,
    }
)
SEEDED = {"temperature": 0.4, "seed": 7}
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.05, "frequency_penalty": 0.1}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "seed": SEEDED,
    "logprobs": {"logprobs": 3},
    "seed, logprobs": {"logprobs": 0, **SEEDED},
    "prompt logprobs": {"prompt_logprobs": 2},
    "bias": {"logit_bias": {7: 2.0, 99: -5.0}, **SEEDED},
    "bias, logprobs": {"logit_bias": dict.fromkeys(range(9), 1.0), "logprobs": 2},
    "minimum": {"min_tokens": 25, "stop_token_ids": list(range(0, 264, 9))},
    "allowed": {"allowed_token_ids": list(range(30, 230)), "logprobs": 1},
    "bad words": {"bad_words": ["token"]},
    "long bad words": {"bad_words": ["tokens"], "logprobs": 1},
    "grammar": {"structured_outputs": ASCII, "ignore_eos": False},
    "grammar, seed, logprobs": {"structured_outputs": ASCII, "logprobs": 2, **SEEDED},
    "object": {"structured_outputs": OBJECT, "ignore_eos": False},
    "reasoning": {"structured_outputs": ASCII, "logit_bias": {THINK_END: 6.0}, **SEEDED},
    "penalties": PENALTIES,
    "strong penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.6},
    "penalties, logprobs": {"logprobs": 2, **PENALTIES, **SEEDED},
    "penalties, grammar": {"structured_outputs": ASCII, **PENALTIES},
}
WORDS = {
    "bad words": [[token] for token in range(20)],
    "long bad words": [[first, last] for first in range(90, 110) for last in range(0, 264, 3)],
}
SITUATIONS: dict[str, dict[str, Any]] = {
    "large": {"max_num_seqs": 80},
    "small": {"max_num_seqs": 8, "max_num_batched_tokens": 72, "num_blocks": 24},
    "one plan": {"num_plans_in_flight": 1, "enable_prefix_caching": False, "max_num_seqs": 30},
    "plans ahead": {"num_plans_in_flight": 4, "max_num_seqs": 40, "block_size": 4},
}
Output = tuple[object, ...]


MODELS = {"ngram": "", "mtp": "demo-hybrid"}


@pytest.fixture(scope="module", params=MODELS)
def method(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(method: str) -> Path:
    return Config(model=MODELS[method]).model_folder


def add(engine: Engine, kind: str) -> Sequence:
    """Add a request to repeat a text, which can be drafted."""
    given = {"temperature": 0.0, "max_tokens": NUM_OUT, "ignore_eos": True} | KINDS[kind]
    prompt = make_example(Random(kind), "repeat", Sizes(40, 60)).prompt
    if kind == "object":
        prompt = 'repeat: {"city": "Paris", "number": 2102650}'
    words = WORDS.get(kind, [])
    sequence = engine.add(kind, list(prompt.encode()), SamplingParams(**given), words)
    if kind == "reasoning":
        sequence.reasoning = "open"
    return sequence


def output_of(sequence: Sequence) -> Output:
    told = sequence.logprobs, sequence.prompt_logprobs
    return sequence.output_token_ids, *told, sequence.finish_reason


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Output]:
    """Return the outputs of plain decoding, one request after the other."""
    engine = engine_of(folder, enable_prefix_caching=False)
    found = {}
    for kind in KINDS:
        sequence = add(engine, kind)
        engine.run()
        found[kind] = output_of(sequence)
    return found


def count_drafts(engine: Engine) -> tuple[Counter[str], Counter[str]]:
    """Return counters of right and wrong drafts of each request, which grow as the engine runs."""
    right: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    update = engine.scheduler.update

    def counted(tokens: SampledTokens) -> object:
        plan, output = engine.scheduler.in_flight[0], update(tokens)
        valid = Counter(output.sequences)
        for sequence, number in Counter(plan.sampled).items():
            right[sequence.request_id] += max(0, valid[sequence] - 1)
            wrong[sequence.request_id] += number - max(1, valid[sequence])
        return output

    engine.scheduler.update = counted  # type: ignore[method-assign, assignment]
    return right, wrong


@pytest.mark.parametrize(("situation", "number"), diagonal(SITUATIONS, [4, 1, 2, 3]))
def test_the_outputs_of_plain_decoding(
    folder: Path, method: str, expected: dict[str, Output], situation: str, number: int
) -> None:
    options = {"speculative_method": method, "num_speculative_tokens": number}
    engine = engine_of(folder, **options | SITUATIONS[situation])
    right, wrong = count_drafts(engine)
    for _ in range(2):  # the second time with a full prefix cache
        sequences = {kind: add(engine, kind) for kind in KINDS}
        engine.run()
        for kind, sequence in sequences.items():
            assert output_of(sequence) == expected[kind], kind
    if (situation, number) == ("large", 4):
        assert {kind for kind in KINDS if not right[kind]} <= {"penalties, grammar"}
        kinds = "minimum", "long bad words", "grammar, seed, logprobs", "object"
        assert [kind for kind in (*kinds, "penalties, grammar") if not wrong[kind]] == []
