"""A client's reaction to the gateway's replies."""

from typing import Any

import msgspec
import pytest

from penstock.protocol.client import session as module
from penstock.protocol.client.session import MAX_PIECE, PendingRequest, RequestError, Session
from penstock.protocol.messages.client import (
    BATCH,
    MSGPACK,
    ErrorReply,
    GenerateReply,
    GenerateRequest,
    Reply,
    ReplyBatch,
    StatusRequest,
    TextDelta,
    TokenLogprobs,
    Usage,
)

TEXT = "abcdef"
TOKEN_IDS = [1, 2, 3]


def ask(stream: bool = True) -> tuple[Session, PendingRequest]:
    session = Session()
    return session, session.ask(GenerateRequest(prompt="x", stream=stream))


def say(session: Session, answer: PendingRequest, reply: Reply) -> None:
    session.receive([answer.frames[0], msgspec.msgpack.encode(reply)])


def delta(first: int, last: int, **fields: Any) -> TextDelta:
    """Tokens `first` to `last` of TOKEN_IDS, of two characters each."""
    return TextDelta(
        request_id="",
        token_offset=first,
        char_offset=2 * first,
        token_ids=TOKEN_IDS[first:last],
        text=TEXT[2 * first : 2 * last],
        **fields,
    )


def reply(**fields: Any) -> GenerateReply:
    usage = Usage(prompt_tokens=1, cached_tokens=0, output_tokens=3)
    return GenerateReply(
        request_id="", text=TEXT, token_ids=TOKEN_IDS, finish_reason="stop", usage=usage, **fields
    )


def logprobs(*token_ids: int) -> list[TokenLogprobs | None]:
    return [
        TokenLogprobs(token_id=token_id, logprob=-1.0, token="", bytes=[], rank=1, top=[])
        for token_id in token_ids
    ]


def taken(answer: PendingRequest) -> list[tuple[list[int], str]]:
    deltas = iter(answer.take_delta, None)
    return [(one.token_ids, one.text) for one in deltas if one is not None]


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        pytest.param([(0, 1), (1, 3)], [([1], "ab"), ([2, 3], "cdef")], id="in order"),
        pytest.param([(0, 2), (0, 2), (2, 3)], [([1, 2], "abcd"), ([3], "ef")], id="twice"),
        pytest.param([(0, 2), (1, 3)], [([1, 2], "abcd"), ([3], "ef")], id="overlapping"),
        pytest.param([(0, 2), (0, 1)], [([1, 2], "abcd"), ([3], "ef")], id="end missing"),
        pytest.param([(0, 1), (2, 3)], [([1], "ab"), ([2, 3], "cdef")], id="gap"),
        pytest.param([], [([1, 2, 3], "abcdef")], id="nothing"),
    ],
)
def test_each_token_is_heard_once(
    said: list[tuple[int, int]], heard: list[tuple[list[int], str]]
) -> None:
    session, answer = ask()
    pieces = []
    for first, last in said:
        say(session, answer, delta(first, last))
        pieces += taken(answer)
    say(session, answer, reply())
    assert pieces + taken(answer) == heard
    assert answer.result() == reply()


def test_what_waits_is_one_piece() -> None:
    """A reader that is slow gets one piece; a piece that it has taken does not change."""
    session, answer = ask()
    say(session, answer, delta(0, 1, logprobs=logprobs(1), prompt_tokens=5))
    first = answer.take_delta()
    say(session, answer, delta(1, 2, logprobs=logprobs(2)))
    say(session, answer, delta(2, 3, logprobs=logprobs(3), finish_reason="stop", stop_reason="f"))
    rest = answer.take_delta()
    assert first == delta(0, 1, logprobs=logprobs(1), prompt_tokens=5)
    expected = delta(1, 3, logprobs=logprobs(2, 3), finish_reason="stop", stop_reason="f")
    assert rest == expected
    assert answer.take_delta() is None


def test_replies_to_several_requests_in_one_message() -> None:
    session, first = ask()
    second = session.ask(GenerateRequest(prompt="y", stream=True))
    numbers = [second.number, b"99", first.number, second.number]
    replies: list[Any] = [delta(0, 2), delta(0, 1), delta(0, 1), reply()]
    frame = msgspec.msgpack.encode(ReplyBatch(numbers=numbers, replies=replies))
    session.receive([BATCH + frame])
    assert taken(first) == [([1], "ab")]
    assert taken(second) == [([1, 2, 3], "abcdef")]
    assert first.final is None
    assert second.result() == reply()


@pytest.mark.parametrize("said", [[(0, 1), (1, 3)], [(0, 2), (1, 3)], [(0, 1)], [(0, 2), (0, 1)]])
def test_logprobs_are_heard_with_their_tokens(said: list[tuple[int, int]]) -> None:
    """A gateway that came after the first token does not know its logprobs; the client does."""
    session, answer = ask()
    for first, last in said:
        say(session, answer, delta(first, last, logprobs=logprobs(*TOKEN_IDS[first:last])))
    say(session, answer, reply(logprobs=[None, *logprobs(2, 3)]))
    heard: list[TokenLogprobs | None] = []
    for one in iter(answer.take_delta, None):
        assert one
        assert one.logprobs is not None
        assert len(one.logprobs) == len(one.token_ids)
        heard += one.logprobs
    assert heard == logprobs(1, 2, 3)
    assert answer.result() == reply(logprobs=logprobs(1, 2, 3))


def test_a_question_that_can_not_be_encoded_is_not_asked() -> None:
    session = Session()
    with pytest.raises(OverflowError):
        session.ask(GenerateRequest(prompt="a", seed=2**70))
    assert session.unanswered() == []


def test_a_token_without_text_and_text_without_a_token_are_heard() -> None:
    session, answer = ask()
    half = TextDelta(request_id="", token_offset=0, char_offset=0, token_ids=[1], text="")
    rest = TextDelta(request_id="", token_offset=1, char_offset=0, token_ids=[], text="é")
    pieces = []
    for one in (half, rest, half, rest):
        say(session, answer, one)
        pieces += taken(answer)
    assert pieces == [([1], ""), ([], "é")]


def test_a_stream_of_its_reply_alone_has_the_counts_of_its_prompt() -> None:
    session, answer = ask()
    say(session, answer, reply())
    first = answer.take_delta()
    assert first is not None
    assert (first.prompt_tokens, first.cached_tokens) == (1, 0)


def test_a_reply_without_stream_makes_no_deltas() -> None:
    session, answer = ask(stream=False)
    say(session, answer, reply())
    assert taken(answer) == []


def test_an_error_is_raised_with_its_field() -> None:
    session, answer = ask()
    say(session, answer, ErrorReply(code="invalid", message="no", field="top_p"))
    with pytest.raises(RequestError, match="no") as raised:
        answer.result()
    assert (raised.value.code, raised.value.field) == ("invalid", "top_p")


def test_what_is_unanswered_is_known_by_name() -> None:
    session = Session()
    answers = [session.ask(GenerateRequest(prompt="x")) for _ in range(3)]
    status = session.ask(StatusRequest(wait=True))
    say(session, answers[1], reply())
    assert session.unanswered() == [answers[0], answers[2], status]
    assert len({answer.request_id for answer in answers}) == 3
    named = session.ask(GenerateRequest(prompt="x", request_id="mine"))
    assert named.request_id == "mine"


def test_nonsense_and_answers_to_nothing_are_dropped() -> None:
    session, first = ask()
    say(session, first, reply())
    answer = session.ask(GenerateRequest(prompt="x"))
    session.receive([b"77", msgspec.msgpack.encode(reply())])
    session.receive([answer.frames[0], b"\xc1"])
    session.receive([b""])
    assert session.unanswered() == [answer]


def test_nonsense_from_the_beginning_is_not_a_gateway() -> None:
    session, answer = ask()
    session.receive([b"HTTP/1.1 400 Bad Request"])
    assert session.unanswered() == []
    with pytest.raises(RequestError, match="is it the HTTP port"):
        answer.result()


def test_a_stream_that_is_asked_for_again_brings_what_it_has() -> None:
    session, answer = ask()
    assert MSGPACK.decode_request(answer.frames[1]) == answer.question
    say(session, answer, delta(0, 2))
    again = MSGPACK.decode_request(answer.frames[1])
    assert isinstance(again, GenerateRequest)
    assert again.output_token_ids == TOKEN_IDS[:2]


def piece(number: int, text: str = "", has_logprobs: bool = False) -> TextDelta:
    """Return one token as piece `number` of a stream of equal ones."""
    return TextDelta(
        request_id="",
        token_offset=number,
        char_offset=number * len(text),
        token_ids=[number],
        text=text,
        logprobs=logprobs(number) if has_logprobs else None,
    )


def test_many_tokens_with_logprobs_are_several_pieces() -> None:
    """To convert one of thousands of logprobs would hold up other streams."""
    session, answer = ask()
    for number in range(1000):
        say(session, answer, piece(number, has_logprobs=True))
    taken = list(iter(answer.take_delta, None))
    assert [one for delta in taken for one in delta.token_ids] == list(range(1000))
    assert max(len(delta.token_ids) for delta in taken) == MAX_PIECE
    assert answer.num_unread == 0


def test_a_stream_that_its_reader_can_not_pass_on_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    session = Session(max_unread_bytes=1000)
    unread, slow = (session.ask(GenerateRequest(prompt="x", stream=True)) for _ in range(2))
    unread.blocked_since = 0.0
    for number in range(30):
        say(session, unread, piece(number, "x" * 100))
        say(session, slow, piece(number, "x" * 100))
    assert session.cut == [unread]
    assert unread.take_delta() is None
    assert isinstance(unread.final, ErrorReply)
    assert "bytes unread" in unread.final.message
    assert session.unanswered() == [slow]
    assert slow.final is None
    assert len(slow.take_delta().text) == 3000  # type: ignore[union-attr]


def test_many_streams_divide_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    session = Session(max_unread_bytes=16_000)
    answers = [session.ask(GenerateRequest(prompt="x", stream=True)) for _ in range(64)]
    answers[0].blocked_since = 0.0
    for number in range(41):
        say(session, answers[0], piece(number, "x" * 100))
    assert session.cut == answers[:1]
