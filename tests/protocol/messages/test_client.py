"""Clients' frames: both encodings, defaults, and what is refused."""

import msgspec
import pytest

from penstock.protocol.messages.client import (
    JSON,
    MSGPACK,
    AbortRequest,
    Codec,
    ErrorReply,
    GenerateRequest,
    PromptFields,
    StatusRequest,
    codec_of,
)


def test_a_developer_is_the_system() -> None:
    frame = b'{"messages": [{"role": "developer", "content": "be brief"}]}'
    (message,) = JSON.decode_request(frame).messages  # type: ignore[union-attr, misc]
    assert message.role == "system"


def test_a_prompt_is_a_whole_request() -> None:
    request = JSON.decode_request(b'{"prompt": "count from 3 to 9", "max_tokens": 64}')
    assert request == GenerateRequest(prompt="count from 3 to 9", max_tokens=64)


@pytest.mark.parametrize("codec", [JSON, MSGPACK])
@pytest.mark.parametrize(
    "request_",
    [
        GenerateRequest(prompt=[1, 2], stop=["a", "b"], temperature=0.5, seed=-1, stream=True),
        AbortRequest(request_id="x"),
        StatusRequest(wait=True),
    ],
)
def test_both_encodings_say_the_same(codec: Codec, request_: msgspec.Struct) -> None:
    frame = codec.encode(request_)
    assert codec_of(frame) is codec
    assert codec_of(frame).decode_request(frame) == request_


@pytest.mark.parametrize("blank", [b" ", b"\n", b"\t"])
def test_json_may_begin_with_white_space(blank: bytes) -> None:
    assert codec_of(blank + b"{}") is JSON


@pytest.mark.parametrize(
    "frame",
    [
        b'{"prompt": ""}',
        b'{"prompt": []}',
        b'{"prompt": [-1]}',
        b'{"prompt": "a", "n": 129}',
        b'{"prompt": "a", "n": 0}',
        b'{"prompt": "a", "max_tokens": 0}',
        b'{"prompt": "a", "temperature": -0.1}',
        b'{"prompt": "a", "temperature": 2.1}',
        b'{"prompt": "a", "top_p": 0}',
        b'{"prompt": "a", "top_p": 1.1}',
        b'{"prompt": "a", "top_k": -2}',
        b'{"prompt": "a", "min_p": 1.5}',
        b'{"prompt": "a", "stop": [""]}',
        b'{"prompt": "a", "stream": "yes"}',
        b'{"prompt": "a", "timeout": 0}',
        b'{"prompt": "a", "timeout": -1}',
        b'{"prompt": "a", "colour": 1}',
        b'{"prompt": "a", "type": "generat"}',
        b'{"messages": []}',
        b'{"messages": [{"role": "cook", "content": "a"}]}',
    ],
)
def test_out_of_range_is_refused(frame: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        JSON.decode_request(frame)


def test_a_time_limit_that_is_no_number_is_refused() -> None:
    """JSON has none; an event loop would fail at it."""
    frame = msgspec.msgpack.encode({"prompt": "a", "timeout": float("nan")})
    with pytest.raises(msgspec.ValidationError):
        MSGPACK.decode_request(frame)


@pytest.mark.parametrize("codec", [JSON, MSGPACK])
def test_an_error_says_when_to_come_again(codec: Codec) -> None:
    error = ErrorReply(code="overloaded", message="m", retry_after=2.5)
    assert codec.decode_reply(codec.encode(error)) == error


def test_requests_have_all_prompt_fields() -> None:
    """A struct can't inherit from two, so they are written twice."""
    ours, theirs = (
        {one.name: (one.type, one.default) for one in msgspec.inspect.type_info(kind).fields}  # type: ignore[attr-defined]
        for kind in (GenerateRequest, PromptFields)
    )
    assert {name: ours[name] for name in theirs} == theirs
