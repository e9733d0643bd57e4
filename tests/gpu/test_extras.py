"""Rows with extras on a GPU: the same tokens in and out of CUDA graphs, next to rows without."""

import re
from collections.abc import Callable
from itertools import count

import pytest
from transformers import PreTrainedTokenizerFast

from penstock.protocol.config import Config
from penstock.protocol.messages.sampling import SamplingParams
from penstock.protocol.messages.structured import StructuredOutputs
from penstock.services.worker.logits_processor import LogitsProcessor
from tests.engine import Engine

pytestmark = pytest.mark.gpu
DEMO = Config().model_folder
REGEX = StructuredOutputs(regex="[a-f]{6}(-[0-9]{3}){2}")
KINDS: list[dict[str, object]] = [
    {},
    {"repetition_penalty": 3.0, "frequency_penalty": 1.4, "presence_penalty": 1.5},
    {"logit_bias": {48: -100.0, 51: -8.0, 97: 12.0}},
    {"min_tokens": 30, "logit_bias": {258: 50.0}},
    {"allowed_token_ids": [*range(97, 110), 258]},
    {"logprobs": 5},
    {"logprobs": 20, "frequency_penalty": 2.0, "temperature": 2.0},
    {"structured_outputs": REGEX},
    {"structured_outputs": REGEX, "repetition_penalty": 1.5, "logprobs": 3, "temperature": 2.0},
    {"presence_penalty": 2.0, "temperature": 2.0, "top_k": 12, "repetition_penalty": 9.0},
    {"frequency_penalty": 2.0, "temperature": 2.0, "top_p": 0.99, "repetition_penalty": 5.0},
]
Answers = list[tuple[list[int], list[list[tuple[int, float]]]]]


def answers(num_copies: int, **options: object) -> Answers:
    """Tokens and logprobs of each of KINDS, several times."""
    engine = Engine(Config(**{"device": "cuda", "kv_cache_gib": 1.0, **options}))  # type: ignore[arg-type]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DEMO)
    prompt = list(tokenizer.encode("count from 30 to 60"))
    sequences = []
    for number, kind in enumerate(KINDS * num_copies):
        sampling = SamplingParams(**{"temperature": 0.0, "seed": 5, "max_tokens": 40, **kind})  # type: ignore[arg-type]
        sequences.append(engine.add(str(number), prompt, sampling))
    engine.run()
    return [
        (one.output_token_ids, [list(packed.pairs()) for packed in one.logprobs or []])
        for one in sequences
    ]


@pytest.fixture(scope="module")
def with_graphs() -> Answers:
    return answers(1, max_num_seqs=len(KINDS))


def test_graphs_change_no_token(with_graphs: Answers) -> None:
    eager = answers(1, max_num_seqs=len(KINDS), enable_cuda_graphs=False)
    assert [tokens for tokens, _ in eager] == [tokens for tokens, _ in with_graphs]
    texts = [bytes(token for token in tokens if token < 256) for tokens, _ in with_graphs]
    assert len(set(texts)) > len(KINDS) // 2
    for kind, text, (tokens, logprobs) in zip(KINDS, texts, with_graphs, strict=True):
        assert ("logprobs" in kind) == bool(logprobs)
        assert all(n == row[0][0] for n, row in zip(tokens, logprobs, strict=bool(logprobs)))
        if "structured_outputs" in kind:
            assert re.fullmatch(REGEX.regex or "", text.decode())
    assert len(with_graphs[3][0]) >= 30


def test_many_rows_with_extras_do_not_disturb_each_other() -> None:
    """Seventy-seven rows, of which more than a chunk of the logits processor is deferred."""
    alone = answers(1, max_num_seqs=len(KINDS), deterministic=True)
    many = answers(7, max_num_seqs=84, deterministic=True)
    assert many == alone * 7


SENTENCE = b"one two three four five six seven"
DEFERRED: list[dict[str, object]] = [
    {"structured_outputs": REGEX},
    {"structured_outputs": REGEX, "repetition_penalty": 1.5, "frequency_penalty": 1.0},
    {"structured_outputs": REGEX, "temperature": 2.0, "top_k": 7, "min_tokens": 9},
    {"structured_outputs": StructuredOutputs(regex="[0-9 ]{33}"), "temperature": 2.0},
    {"bad_words": [[48, 49], [51, 32, 51], *([32, digit] for digit in range(48, 54))]},
    {"bad_words": [[32, 51]], "temperature": 2.0, "top_p": 0.9, "presence_penalty": 1.0},
    {"bad_words": [[97, 98]], "allowed_token_ids": [97, 98, 258], "temperature": 1.0},
]
PLAIN: list[dict[str, object]] = [{}, KINDS[1], {"temperature": 1.0}, KINDS[2], {"logprobs": 2}]


def rows_that_come_and_go(num_rows: int, **options: object) -> tuple[list[list[int]], int]:
    """Tokens of rows of each kind, up to 11 at a time, of several lengths; and preemptions."""
    config = {
        "device": "cuda",
        "max_num_seqs": 11,
        "kv_cache_gib": 1.0,
        "block_size": 16,
        **options,
    }
    engine = Engine(Config(**config))  # type: ignore[arg-type]
    kinds = [kind for pair in zip(DEFERRED, [*PLAIN, {}, {}], strict=True) for kind in pair]
    sequences = []
    for number in range(num_rows):
        kind = {"temperature": 0.0, "seed": number, **kinds[number % len(kinds)]}
        bad_words = kind.pop("bad_words", [])
        prompt = list(SENTENCE[: 5 + number % 9] * (1 + number % 5))
        sampling = SamplingParams(max_tokens=5 + 7 * number % 37, ignore_eos=False, **kind)  # type: ignore[arg-type]
        sequences.append(engine.add(str(number), prompt, sampling, bad_words))  # type: ignore[arg-type]
    engine.run()
    return [one.output_token_ids for one in sequences], engine.scheduler.num_preemptions


@pytest.fixture
def on_copies(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return how often deferred rows were sampled outside a graph."""
    calls, sample_copies = count(), LogitsProcessor._sample_copies

    def counted(*arguments: object) -> None:
        next(calls)
        sample_copies(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(LogitsProcessor, "_sample_copies", counted)
    return lambda: next(calls)


@pytest.mark.parametrize("num_blocks", [0, 12])
def test_the_second_graph_samples_what_eager_steps_do(
    on_copies: Callable[[], int], num_blocks: int
) -> None:
    """Rows join, end and are preempted, so that slots change hands and shapes vary."""
    graphs, num_preemptions = rows_that_come_and_go(40, num_blocks=num_blocks)
    eager, _ = rows_that_come_and_go(40, num_blocks=num_blocks, enable_cuda_graphs=False)
    assert on_copies() == 0
    assert (num_preemptions > 0) == (num_blocks > 0)
    differing = [n for n, (a, b) in enumerate(zip(graphs, eager, strict=True)) if a != b]
    assert len(differing) <= 2, differing  # products of other shapes round differently
    for number, tokens in enumerate(graphs):
        kind = DEFERRED[number // 2 % len(DEFERRED)] if number % 2 == 0 else {}
        text = bytes(token for token in tokens if token < 256)
        for word in kind.get("bad_words", []):  # type: ignore[attr-defined]
            assert bytes(word) not in text
        if kind.get("structured_outputs") is REGEX:
            assert any(
                re.fullmatch(REGEX.regex or "", (text + rest).decode())
                for rest in (b"abcdef-012-012"[n:] for n in range(15))
            )
