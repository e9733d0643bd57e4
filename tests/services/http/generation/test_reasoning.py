"""The reasoning and the answer are the same however the tokens come, and end at a token."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.messages.client import TextDelta
from penstock.services.http.generation.chat import ReasoningSplitter
from tests.services.http.generation.reasoning_spans import (
    END_THINK,
    THINK,
    deltas,
    span,
    tagged,
    tokens,
)

PARTS = ["<think>", "</think>", "<", "</thi", "think>", "\n", "\n\n", " ", "a", "7 é"]
TEXTS = st.lists(st.sampled_from(PARTS)).map("".join)
TOKENS = st.lists(st.sampled_from([THINK, END_THINK, *PARTS])).map(lambda parts: tokens(*parts))


def split(pieces: list[TextDelta]) -> tuple[str, str]:
    splitter = ReasoningSplitter()
    parts = [splitter.feed(one.text, one.reasoning_begin, one.reasoning_end) for one in pieces]
    parts.append(splitter.finish())
    return "".join(r for r, _ in parts), "".join(c for _, c in parts)


def split_tokens(token_ids: list[int], **fields: Any) -> tuple[str, str]:
    """Return both parts, which must not depend on how the tokens come."""
    one_by_one = split(deltas([[token] for token in token_ids], **fields))
    assert split(deltas([token_ids], **fields)) == one_by_one
    return one_by_one


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\n1 and 2\n\nmake 3\n</think>\n\n3\n", "1 and 2\n\nmake 3", "3\n"),
        ("\n <think>a</think>b", "a", "b"),
        ("<think>\n\n</think>\n\n3", "", "3"),
        ("<think>\nfar too lon", "far too lon", ""),
        ("<think>\na\n\n", "a", ""),
        ("<think>\na\n</thin", "a\n</thin", ""),
        ("<think>a</think>b</think>c<think>", "a", "b</think>c<think>"),
        ("\n\n3 < 4", "", "\n\n3 < 4"),
        ("<thin ice", "", "<thin ice"),
        ("<thin", "", "<thin"),
        ("3 <think>4</think>", "", "3 <think>4</think>"),
        ("", "", ""),
    ],
)
def test_splits(text: str, reasoning: str, content: str) -> None:
    assert split_tokens(tagged(text)) == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("\nhm\n</think>\n\n3", "hm", "3"),
        ("<think>\nhm\n</think>\n\n3", "hm", "3"),
        ("</think>\n\n3", "", "3"),
        ("hm", "hm", ""),
        ("\n<thi", "<thi", ""),
    ],
)
def test_prompt_begins_the_reasoning(text: str, reasoning: str, content: str) -> None:
    assert split_tokens(tagged(text), starts_reasoning=True) == (reasoning, content)


def test_a_spelled_tag_is_text() -> None:
    """Grammars begin after the token; so does the answer."""
    thought = "I close with </think>\n\nor not"
    token_ids = tokens(THINK, f"\n{thought}\n", END_THINK, "\n\n{}")
    assert split_tokens(token_ids) == (thought, "{}")
    assert split_tokens(tokens("<think>a</think>b")) == ("", "<think>a</think>b")
    assert split_tokens(tokens("a</think>", END_THINK, "b"), starts_reasoning=True) == (
        "a</think>",
        "b",
    )


@given(TOKENS, st.sets(st.integers(1, 60)), st.booleans(), st.sampled_from([[], ["\n"], ["a7"]]))
def test_batches_do_not_matter(
    token_ids: list[int], cuts: set[int], starts_thinking: bool, stop: list[str]
) -> None:
    ends = [0, *sorted(cuts), len(token_ids)]
    batches = [token_ids[start:end] for start, end in pairwise(ends)]
    fields = {"starts_reasoning": starts_thinking, "stop": stop}
    found = split(deltas(batches, **fields))
    assert found == split(deltas([[token] for token in token_ids], **fields))


@given(TEXTS, st.sets(st.integers(1, 60)), st.booleans())
def test_pieces_do_not_matter(text: str, cuts: set[int], starts_thinking: bool) -> None:
    """A piece may know where reasoning ends before the text gets there."""
    ends = [0, *sorted(cuts), len(text)]
    fields = span(text, starts_thinking)
    pieces = [
        TextDelta(request_id="r", token_offset=0, char_offset=0, token_ids=[], text=one, **fields)
        for one in (text[start:end] for start, end in pairwise(ends))
    ]
    assert split(pieces) == split_tokens(tagged(text), starts_reasoning=starts_thinking)


@given(TOKENS, st.booleans())
def test_holds_back_only_white_space(token_ids: list[int], starts_thinking: bool) -> None:
    splitter = ReasoningSplitter()
    for one in deltas([[token] for token in token_ids], starts_reasoning=starts_thinking):
        splitter.feed(one.text, one.reasoning_begin, one.reasoning_end)
    assert not "".join(splitter.finish()).strip()
