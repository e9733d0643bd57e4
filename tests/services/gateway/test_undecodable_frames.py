"""Frames that are nested too deep, or not an object of finite numbers."""

from typing import Any

import msgspec
import pytest
from msgspec.inspect import AnyType, type_info

from penstock.protocol.messages.codec import JSON, MSGPACK, REQUEST_TYPES
from penstock.protocol.nesting import MAX_DEPTH
from penstock.services.gateway.validation import UNTYPED, decode_request
from tests.services.gateway.test_validation import MAX_BYTES, refusal


def nested(levels: int) -> Any:
    """Return maps and lists in turns."""
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


@pytest.mark.parametrize("encode", [msgspec.json.encode, msgspec.msgpack.encode])
@pytest.mark.parametrize("field", ["tools", "chat_template_kwargs", "messages"])
def test_depth_has_a_limit(encode, field) -> None:  # type: ignore[no-untyped-def]
    def frame(depth: int) -> bytes:
        untyped = {"a": nested(depth - 1)}  # at depth 1
        around = {
            "tools": [untyped],
            "chat_template_kwargs": untyped,
            "messages": [{"role": "user", "content": "x", "tool_calls": [untyped]}],
        }
        return encode({"messages": [{"role": "user", "content": "x"}]} | {field: around[field]})

    levels_around = {"tools": 1, "chat_template_kwargs": 0, "messages": 3}[field]
    fits = MAX_DEPTH - levels_around
    codec = JSON if encode is msgspec.json.encode else MSGPACK
    decode_request(codec, frame(fits), MAX_BYTES)
    for depth in (fits + 1, 900):
        error = refusal(frame(depth))
        assert error.reply.field == field
        assert str(error) == f"{field}: got a deeper nesting, expected up to 64 levels"


@pytest.mark.parametrize(
    ("frame", "field", "message"),
    [
        (b"[]", None, "the request: got `array`, expected an object of the fields"),
        (b'{"prompt": "x", "temperature": NaN}', "temperature", "temperature: got NaN or a number"),
        (b'{"prompt": "x", "top_p": 1e999}', "top_p", "top_p: got NaN or a number beyond 64 bits"),
        (b'{"prompt": "\\ud800"}', "prompt", "prompt: got an invalid UTF-16 surrogate"),
        (b"{", None, "the request: got an undecodable frame"),
    ],
)
def test_what_is_no_object_of_finite_numbers(frame: bytes, field: str | None, message: str) -> None:
    error = refusal(frame)
    assert error.reply.field == field
    assert str(error).startswith(message)


def test_what_recurses_too_deep_to_be_decoded_is_refused() -> None:
    for frame in (b'{"tools": [' + b"[" * 50_000, b"\x81\xa5tools" + b"\x91" * 50_000 + b"\xc0"):
        assert "got an undecodable frame" in str(refusal(frame))


def test_every_field_that_takes_anything_has_its_depth_checked() -> None:
    found = {
        field.name
        for kind in REQUEST_TYPES.values()
        for field in type_info(kind).fields  # type: ignore[attr-defined]
        if takes_anything(field.type)
    }
    assert found == set(UNTYPED)


def takes_anything(info: Any) -> bool:
    if isinstance(info, AnyType):
        return True
    inner = [getattr(info, name, None) for name in ("type", "item_type", "value_type", "key_type")]
    inner += getattr(info, "types", ())
    inner += [field.type for field in getattr(info, "fields", ())]
    return any(takes_anything(one) for one in inner if isinstance(one, msgspec.inspect.Type))
