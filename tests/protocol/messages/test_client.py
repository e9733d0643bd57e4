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
