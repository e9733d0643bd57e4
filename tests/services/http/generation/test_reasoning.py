"""The reasoning and the answer are the same however the text is cut into pieces."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.services.http.generation.reasoning_splitter import ReasoningSplitter

TEXTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "</thi", "think>", "\n", "\n\n", " ", "a", "7 é"])
).map("".join)


def split(pieces: list[str], *, starts_thinking: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(starts_thinking)
    parts = [*map(splitter.feed, pieces), splitter.finish()]
    return "".join(r for r, _ in parts), "".join(c for _, c in parts)


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
    assert split([text]) == (reasoning, content)
    assert split(list(text)) == (reasoning, content)


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
    assert split([text], starts_thinking=True) == (reasoning, content)
    assert split(list(text), starts_thinking=True) == (reasoning, content)


@given(text=TEXTS, cuts=st.sets(st.integers(1, 60)), starts_thinking=st.booleans())
def test_pieces_do_not_matter(text: str, cuts: set[int], starts_thinking: bool) -> None:
    ends = [0, *sorted(cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(ends)]
    whole = split([text], starts_thinking=starts_thinking)
    assert split(pieces, starts_thinking=starts_thinking) == whole


@given(text=TEXTS, starts_thinking=st.booleans())
def test_holds_back_only_newlines_and_half_a_tag(text: str, starts_thinking: bool) -> None:
    splitter = ReasoningSplitter(starts_thinking)
    for character in text:
        splitter.feed(character)
    held = "".join(splitter.finish()).strip()
    assert any(tag.startswith(held) for tag in ("<think>", "</think>"))
