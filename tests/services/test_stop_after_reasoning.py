"""Stop strings and stop tokens end the answer, not the reasoning before it."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.messages.client import TextDelta
from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.pipeline import StepTokens
from penstock.protocol.tokenizer_file import ReasoningTokens, read_reasoning_tokens
from penstock.services.detokenizer.process import Detokenizer
from penstock.services.detokenizer.text_stream import TextStream
from tests.services.http.generation.reasoning_spans import (
    END_THINK,
    THINK,
    deltas,
    opened,
    tagged,
    tokens,
)
from tests.services.scheduler.builders import make_sequence
from tests.services.scheduler.reference import TAGS
from tests.services.test_detokenizer import DEMO, TABLE

ANSWER = "<think>\nThe user wants four.\n</think>\n\nAnswer: three and four."


def text_of(text: str, *, is_open: bool = False, **fields: object) -> tuple[str, str | None]:
    """Return the text of a chat's answer, and the stop string that ended it."""
    found = deltas([[token] for token in tagged(text)], starts_reasoning=is_open, **fields)
    assert found[-1].finish_reason == "stop"
    return "".join(one.text for one in found), found[-1].stop_reason  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("stop", "expected", "reason"),
    [
        (["four"], "Answer: three and ", "four"),
        (["\n"], "Answer: three and four.", None),
        (["\n\n"], "Answer: three and four.", None),
        (["wants"], "Answer: three and four.", None),
        (["</think>"], "Answer: three and four.", None),
        (["think>\n\nA"], "Answer: three and four.", None),
        (["<think>"], "Answer: three and four.", None),
    ],
)
def test_stop_strings(stop: list[str], expected: str, reason: str | None) -> None:
    text, stopped = text_of(ANSWER, stop=stop)
    assert (text.partition("</think>")[2].lstrip("\n"), stopped) == (expected, reason)
    text, stopped = text_of(ANSWER.removeprefix("<think>"), is_open=True, stop=stop)
    assert (text.partition("</think>")[2].lstrip("\n"), stopped) == (expected, reason)


@pytest.mark.parametrize("stop", ["\n", "\n\n"])
def test_newlines_next_to_the_tag_are_not_the_answer(stop: str) -> None:
    text, stopped = text_of("<think>\na\n</think>\n\nb" + stop + "c", stop=[stop])
    assert (text, stopped) == ("<think>\na\n</think>\n\nb", stop)
    assert text_of("\nb", stop=["\n"]) == ("", "\n")  # no reasoning


def test_text_without_reasoning_is_the_answer() -> None:
    assert text_of("a four", stop=["four"]) == ("a ", "four")
    assert text_of("a<think>four", stop=["four"]) == ("a<think>", "four")


def test_a_prompt_without_messages_has_no_reasoning() -> None:
    message = opened(stop=["wants"], starts_reasoning=True)
    message.is_chat = False
    delta = TextStream(message, TABLE).feed(tagged(ANSWER))
    assert delta.text == "<think>\nThe user "
    assert (delta.reasoning_begin, delta.reasoning_end) == (None, None)


def test_tokens_without_text() -> None:
    """EOS has no text anywhere, a stop token in the answer alone."""
    fields = {"eos_token_ids": [258], "stop_token_ids": [ord("f"), 258]}
    token_ids = [*tagged("<think>for</think>f"), 258]
    for batches in ([token_ids], [[one] for one in token_ids]):
        found = deltas(batches, skip_special_tokens=False, **fields)
        assert "".join(one.text for one in found) == "<think>for</think>"
    cut = deltas([[THINK, *b"f", 258]], skip_special_tokens=False, **fields)
    assert "".join(one.text for one in cut) == "<think>f"


@given(
    st.lists(st.sampled_from([THINK, END_THINK, *b"ab \n", *"é".encode()])),
    st.lists(st.sampled_from(["a", "ab", "\n", "b a", "é"]), max_size=2),
    st.booleans(),
    st.sets(st.integers(0, 30)),
)
def test_a_stream_that_moves_stops_at_the_same_place(
    token_ids: list[int], stop: list[str], is_open: bool, cuts: set[int]
) -> None:
    """Each detokenizer gets all tokens so far, and dies after a few more."""
    expected = deltas([[token] for token in token_ids], stop=stop, starts_reasoning=is_open)
    known: list[TextDelta] = []
    ends = [0, *sorted(cuts), max(len(token_ids), *cuts, 0)]
    for start, end in pairwise(ends):
        given, new = token_ids[:start], token_ids[start:end]
        stream = opened(given, stop=stop, starts_reasoning=is_open)
        message = StepTokens(1, [stream], pack([1] * len(new)), pack(new))
        if end == ends[-1]:
            message.finished = [(1, "stop")]
        known, _ = Detokenizer(TABLE).handle(message)
        if known[-1].finish_reason:
            break
    assert "".join(one.text for one in known) == "".join(one.text for one in expected)
    names = ("reasoning_begin", "reasoning_end", "stop_reason", "finish_reason")
    for name in names:
        assert getattr(known[-1], name) == getattr(expected[-1], name)


def test_stop_tokens_end_the_answer() -> None:
    """`</think>` itself may be one: it is no longer reasoning."""
    begin, end = TAGS.begin, TAGS.end
    for output, stops, expected in (
        ([begin, 7], [7], False),
        ([begin, 7, end, 8], [7], False),
        ([begin, 7, end, 7], [7], True),
        ([begin, 7, end], [end], True),
        ([9, 7], [7], True),
        ([begin, 0], [7], True),
    ):
        grown = make_sequence(is_chat=True, stop_token_ids=stops)
        found = [grown.token_ids.append(token) or grown.is_stopped() for token in output]  # type: ignore[func-returns-value]
        resumed = make_sequence(output=output, is_chat=True, stop_token_ids=stops)
        assert found[-1] == resumed.is_stopped() == expected, output
    assert make_sequence(output=[begin, 7], stop_token_ids=[7]).is_stopped()
    assert not make_sequence(
        output=[7], is_chat=True, reasoning="open", stop_token_ids=[7]
    ).is_stopped()


def test_stop_tokens_of_white_space_end_the_answer_alone() -> None:
    """Models write newlines after `</think>`, which are not the answer's first line."""
    begin, end, newline = 1, 2, 3
    tags = ReasoningTokens(begin, end, frozenset([newline]))
    for output, expected in (
        ([begin, newline, end, newline], False),
        ([begin, newline, end, newline, newline], False),
        ([begin, newline, end, newline, 7, newline], True),
        ([begin, newline, end, 7, newline], True),
        ([newline], True),
    ):
        stopped = make_sequence(output=output, is_chat=True, tags=tags, stop_token_ids=[newline])
        assert stopped.is_stopped() == expected, output
    newlines = deltas([[*tagged("<think>a</think>\nb\n")]], stop_token_ids=[ord("\n")])
    assert "".join(one.text for one in newlines) == "<think>a</think>\nb"


def test_the_tags_of_a_vocabulary() -> None:
    blank = frozenset(b" \t\n\r\v\f")
    assert read_reasoning_tokens(DEMO) == ReasoningTokens(THINK, END_THINK, blank)
    assert tokens(THINK, "a") == [THINK, 97]
