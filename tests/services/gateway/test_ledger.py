"""The ledger takes each token once, whatever is repeated."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.messages.client import (
    JSON,
    ChatMessage,
    GenerateRequest,
    TextDelta,
    TokenLogprobs,
)
from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.status import RequestTimes
from penstock.services.gateway.ledger import Ledger
from penstock.services.gateway.request import (
    Client,
    Connection,
    GapError,
    Request,
    Share,
    estimated_tokens,
)

TEXT = "0123456789" * 4


def entry(request_id: str = "a", num_bytes: int = 0, **fields: Any) -> Request:
    request = GenerateRequest(**{"prompt": "p", "stream": True} | fields)
    return Request(request, request_id, Client((b"c",), JSON, Connection(), Share("")), num_bytes)


def logprobs(begin: int, end: int) -> list[TokenLogprobs | None]:
    """Return the logprobs of tokens `begin` to `end`, without alternatives."""
    return [
        TokenLogprobs(token_id=token_id, logprob=-1.0, token="", bytes=[], rank=1, top=[])
        for token_id in range(begin, end)
    ]


def delta(begin: int, end: int, attempt: int = 0, **fields: Any) -> TextDelta:
    """Tokens `begin` to `end`, where each token is one character."""
    return TextDelta(
        request_id="a",
        token_offset=begin,
        char_offset=begin,
        token_ids=list(range(begin, end)),
        text=TEXT[begin:end],
        attempt=attempt,
        **fields,
    )


def counts(totals: Share) -> tuple[int, int, int]:
    return totals.num_waiting, totals.num_waiting_tokens, totals.num_started


def append(ledger: Ledger, open_: Request, delta: TextDelta) -> bool:
    """As `Requests` does."""
    num_bytes = open_.num_bytes
    is_new = open_.append(delta)
    ledger.record_growth(open_, num_bytes)
    return is_new


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans())))
def test_repeats_are_trimmed_and_what_is_untold_adds_up(
    steps: list[tuple[int, int, bool]],
) -> None:
    """Each step goes back by some tokens and then on by others; the client may have no room."""
    open_ = entry()
    ledger, totals = Ledger(), Share()
    ledger.open(open_, totals)
    known = 0
    seen: list[int] = []
    text = ""
    for back, length, has_room in [*steps, (9, len(TEXT), True)]:
        begin = max(0, known - back)
        end = min(begin + length, len(TEXT))
        assert append(ledger, open_, delta(begin, end)) == (end > known)
        known = max(known, end)
        assert open_.token_ids == list(range(known))
        assert open_.num_unread_bytes == 9 * (known - len(seen))
        assert totals.num_bytes == 9 * known
        new = open_.undelivered()
        assert (new is None) == (known == len(seen))
        if new is not None and has_room:
            assert (new.token_offset, new.char_offset) == (len(seen), len(text))
            seen += new.token_ids
            text += new.text
            open_.mark_delivered()
    assert seen == list(range(len(TEXT)))
    assert text == open_.reply("length").text == TEXT
    open_.rewind()
    again = open_.undelivered()
    assert again
    assert (again.token_offset, again.char_offset, again.text) == (0, 0, TEXT)


def test_who_wants_no_stream_is_told_nothing_before_the_end() -> None:
    open_ = entry(stream=False)
    open_.append(delta(0, 3))
    assert open_.undelivered() is None
    assert open_.num_unread_bytes == 0
    open_.answer = open_.reply("stop")
    assert open_.num_unread_bytes == 3 * 9


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans())))
def test_every_token_keeps_its_logprobs(steps: list[tuple[int, int, bool]]) -> None:
    """Logprobs are sent once, like tokens.

    Tokens that the client brought have none; clients that requested none receive none.
    """
    open_, other = entry(logprobs=0, output_token_ids=[0, 1]), entry(output_token_ids=[0, 1])
    known = 0
    heard: list[TokenLogprobs | None] = []
    for back, length, has_room in [*steps, (0, 2, False), (9, len(TEXT), True)]:
        begin = max(0, known - back)
        end = min(begin + length, len(TEXT))
        known = max(known, end)
        for one in (open_, other):
            one.append(delta(begin, end, logprobs=logprobs(begin, end)))
        new = open_.undelivered()
        if new and has_room:
            assert new.logprobs is not None
            assert len(new.logprobs) == len(new.token_ids)
            heard += new.logprobs
            open_.mark_delivered()
    expected = [None, None, *logprobs(2, len(TEXT))]
    assert heard == open_.reply("stop").logprobs == expected
    assert (other.undelivered() or delta(0, 0)).logprobs is other.reply("stop").logprobs is None


def test_logprobs_that_nobody_knows() -> None:
    """After a restart of all other processes, the gateway's own tokens keep what is known."""
    ledger, totals, open_ = Ledger(), Share(), entry(logprobs=0)
    ledger.open(open_, totals)
    append(ledger, open_, delta(0, 2, logprobs=logprobs(0, 2)))
    ledger.begin_attempt(open_)
    late = [None, None, *logprobs(2, 3)]
    append(ledger, open_, delta(0, 3, open_.attempt, logprobs=late))
    append(ledger, open_, delta(3, 4, open_.attempt))
    assert open_.reply("stop").logprobs == [*logprobs(0, 3), None]


def test_logprobs_of_the_prompt_come_once_and_go_with_the_reply() -> None:
    ledger, totals, open_ = Ledger(), Share(), entry(prompt_logprobs=3)
    ledger.open(open_, totals)
    of_prompt = [None, *logprobs(1, 4)]
    assert not append(ledger, open_, delta(0, 0, prompt_logprobs=of_prompt))
    assert append(ledger, open_, delta(0, 2, prompt_logprobs=[None]))
    assert (open_.undelivered() or delta(0, 0)).prompt_logprobs == of_prompt
    unread = open_.num_unread_bytes
    open_.mark_delivered()
    assert append(ledger, open_, delta(2, 4))
    assert (open_.undelivered() or delta(0, 0)).prompt_logprobs is None
    assert open_.num_unread_bytes < unread - 2 * 3
    assert open_.reply("stop").prompt_logprobs == of_prompt


def test_logprobs_count_as_bytes() -> None:
    ledger, totals, open_ = Ledger(), Share(), entry(logprobs=2, prompt_logprobs=1)
    ledger.open(open_, totals)
    append(ledger, open_, delta(0, 3, logprobs=logprobs(0, 3), prompt_logprobs=logprobs(0, 5)))
    of_tokens, of_prompt = 3 * (9 + 3 * 256), 5 * 2 * 256
    assert totals.num_bytes == of_tokens + of_prompt
    assert open_.num_unread_bytes == of_tokens + of_prompt
    open_.mark_delivered()
    assert open_.num_unread_bytes == 0
    ledger.answer(open_, open_.reply("stop"))
    assert open_.num_unread_bytes == of_tokens + of_prompt
    ledger.remove(open_)
    assert totals.num_bytes == 0


def test_a_gap_is_an_error() -> None:
    open_ = entry()
    open_.append(delta(0, 3))
    with pytest.raises(GapError, match="token 5; 3 are known"):
        open_.append(delta(5, 6))


def test_deltas_of_an_older_attempt_are_dropped() -> None:
    ledger = Ledger(first_attempt=100)
    open_ = entry()
    ledger.open(open_, Share())
    ledger.begin_attempt(open_)
    assert not open_.append(delta(0, 3, attempt=100))
    assert open_.append(delta(0, 3, attempt=101))
    assert open_.submission().request.output_token_ids == pack([0, 1, 2])
    assert open_.submission().request.attempt == 101


def test_what_is_answered_is_not_open() -> None:
    ledger = Ledger()
    open_ = entry()
    ledger.open(open_, Share())
    ledger.answer(open_, open_.reply("stop"))
    assert (ledger.get("a"), ledger.find("a")) == (None, open_)
    assert (ledger.num_open, len(ledger)) == (0, 1)


@pytest.mark.parametrize(
    ("request_", "num_tokens"),
    [
        (GenerateRequest(prompt=[7] * 9), 9),
        (GenerateRequest(prompt="é" * 20), 10),
        (GenerateRequest(prompt="a"), 1),
        (GenerateRequest(messages=[ChatMessage(role="user", content="x" * 8)] * 2), 4),
    ],
)
def test_estimates(request_: GenerateRequest, num_tokens: int) -> None:
    assert estimated_tokens(request_) == num_tokens


def test_what_waits() -> None:
    """A prompt waits until a token has come of it; then it does so in no later attempt."""
    ledger, totals = Ledger(), Share()
    first, second = entry("a", prompt="x" * 40), entry("b", prompt=[1, 2])
    ledger.open(first, totals)
    ledger.open(second, totals)
    assert (
        totals.num_waiting,
        totals.num_waiting_tokens,
        totals.num_started,
    ) == (2, 12, 0)
    ledger.record_tokenized(first, 30, b"")
    assert totals.num_waiting_tokens == 32
    assert append(ledger, first, delta(0, 1))
    assert (
        totals.num_waiting,
        totals.num_waiting_tokens,
        totals.num_started,
    ) == (1, 2, 1)
    ledger.begin_attempt(first)
    ledger.record_tokenized(first, 30, b"")
    assert (totals.num_waiting, totals.num_waiting_tokens) == (1, 2)
    ledger.remove(second)
    assert (
        totals.num_waiting,
        totals.num_waiting_tokens,
        totals.num_started,
    ) == (0, 0, 1)


def test_bytes() -> None:
    ledger, totals = Ledger(), Share()
    one = entry(num_bytes=100)
    ledger.open(one, totals)
    append(ledger, one, delta(0, 4))
    assert totals.num_bytes == 100 + 4 * 9
    ledger.answer(one, one.reply("stop"))
    assert totals.num_bytes == 100 + 4 * 9  # until the client has it
    for _ in range(2):
        ledger.remove(one)
        assert totals.num_bytes == 0


@pytest.mark.parametrize(
    ("fields", "ends", "expected"),
    [
        ({}, {"finish_reason": "stop"}, None),
        ({"stop": ["z"]}, {"finish_reason": "stop", "stop_reason": "z"}, "z"),
        ({"stop_token_ids": [2]}, {"finish_reason": "stop"}, 2),
        ({"stop_token_ids": [1]}, {"finish_reason": "stop"}, None),
        ({"stop_token_ids": [2]}, {"finish_reason": "length"}, None),
    ],
)
def test_why_it_stopped(
    fields: dict[str, Any], ends: dict[str, Any], expected: str | int | None
) -> None:
    open_ = entry(**fields)
    open_.append(delta(0, 3, **ends))
    assert open_.reply(ends["finish_reason"]).stop_reason == expected


def test_times_of_the_first_attempt_that_has_them() -> None:
    open_ = entry()
    assert open_.reply("abort").times is None
    open_.accepted_at, open_.first_token_at, open_.last_token_at = 10.0, 12.0, 15.0
    open_.append(delta(0, 1))
    open_.append(delta(0, 2, phase_seconds=(0.5, 1.0)))
    open_.append(delta(0, 3, phase_seconds=(7.0, 7.0)))
    assert open_.reply("length").times == RequestTimes(
        queue=0.5, prefill=1.0, decode=3.0, first_token=2.0
    )
