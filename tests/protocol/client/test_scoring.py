"""Requests and scores of pairs of texts."""

import random
import tracemalloc
from array import array
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from penstock.protocol.client.scoring import LABELS, Scoring, label_id, result_of
from penstock.protocol.client.session import RequestError
from penstock.protocol.messages.client import GenerateReply, Usage

PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
TASK = "Given a web search query, retrieve relevant passages that answer the query"


def reply(*numbers: float) -> GenerateReply:
    usage = Usage(prompt_tokens=1, cached_tokens=0, output_tokens=0)
    pooled = array("f", numbers).tobytes() if numbers else None
    return GenerateReply(
        request_id="r", text="", token_ids=[], finish_reason="stop", usage=usage, pooled=pooled
    )


def test_the_tokens_of_a_pair_are_those_of_the_models_card(qwen3_folder: Path) -> None:
    """The card encodes the ends of the prompt apart from the texts between them."""
    tokenizer = Tokenizer.from_file(str(qwen3_folder / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    assert [label_id(label, encode(label)) for label in LABELS] == [9693, 2152]
    draw = random.Random(0)
    characters = [*map(chr, range(32, 127)), "\n", "\n\n", "  ", "é", "你", "🙂", "'s"]
    for _ in range(200):
        query, document = ("".join(draw.choices(characters, k=draw.randint(0, 60))) for _ in "12")
        (request,) = Scoring([(query, document)], [9693, 2152]).requests
        body = f"<Instruct>: {TASK}\n<Query>: {query}\n<Document>: {document}"
        assert encode(request["prompt"]) == encode(PREFIX) + encode(body) + encode(SUFFIX)
        assert request["add_special_tokens"] is False
        assert request["pooling"].label_ids == [9693, 2152]


def test_a_score_is_the_first_label() -> None:
    scoring = Scoring([("q", "a"), ("q", "b")], [1, 2], "rank them")
    assert [one["prompt"].count("<Instruct>: rank them\n") for one in scoring.requests] == [1, 1]
    assert scoring.parts[1] == {"instruction": "rank them", "query": "q", "document": "b"}
    assert scoring.scores([reply(0.25, 0.75), reply(0.5, 0.5)]) == [0.25, 0.5]


@pytest.mark.parametrize(
    ("instruction", "query"), [(None, "q"), ("find it", "Instruct: find it\nQuery:q")]
)
def test_embedding_models_embed_each_text_once(instruction: str | None, query: str) -> None:
    scoring = Scoring([("q", "a"), ("q", "b"), ("q", "a")], None, instruction)
    assert [one["prompt"] for one in scoring.requests] == [query, "a", "b"]
    replies = [reply(1.0, 0.0), reply(0.5, 0.25), reply(0.0, 1.0)]
    assert scoring.scores(replies) == [0.5, 0.0, 0.5]


@pytest.mark.parametrize("label_ids", [None, [1, 2]])
def test_pairs_with_a_long_query_take_the_memory_of_one(label_ids: list[int] | None) -> None:
    query = "q" * 1_000_000
    pairs = [(query, str(number)) for number in range(200)]
    tracemalloc.start()
    try:
        scoring = Scoring(pairs, label_ids, "find it")
        for request in scoring.requests:
            assert request["prompt"]
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_a_request_that_was_aborted_has_no_result() -> None:
    with pytest.raises(RequestError, match="aborted before its prompt was computed"):
        result_of(reply())


def test_a_tokenizer_without_a_token_for_a_label() -> None:
    with pytest.raises(RequestError, match="model: got 3 tokens for 'yes', expected 1") as caught:
        label_id("yes", [1, 2, 3])
    assert (caught.value.code, caught.value.field) == ("invalid", "model")
