"""Frames that are nested too deep, or not an object of finite numbers."""

from typing import Any

import msgspec
import pytest
from msgspec.inspect import AnyType, type_info

from penstock.protocol.decoding import MAX_CONTAINERS, MAX_DEPTH, MAX_STRINGS
from penstock.protocol.messages.client import JSON, MSGPACK, REQUEST_TYPES
from penstock.services.gateway.admission import UNTYPED, RefusedError, decode_request
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


@pytest.mark.parametrize("encode", [msgspec.json.encode, msgspec.msgpack.encode])
@pytest.mark.parametrize("part", [[], {}, {"a": [1]}, ["\\", "[", {'"': "]"}]])
def test_the_number_of_lists_and_maps_has_a_limit(encode: Any, part: Any) -> None:
    text = '[{"\\"' * MAX_CONTAINERS
    per_part = {0: 1, 1: 2, 3: 2}[len(part)]

    def frame(num_parts: int, scalar: Any = 1) -> bytes:
        untyped = {"x": [part] * num_parts, "y": [scalar] * 100_000, "z": text}
        message = {"role": "user", "content": "x"}
        encoded: bytes = encode({"messages": [message], "chat_template_kwargs": untyped})
        return encoded

    codec = JSON if encode is msgspec.json.encode else MSGPACK
    for scalar in (1, 300, 70_000, 2**40, -1, -200, -(2**40), 1.5, None, True, "é", "y" * 40):
        decode_request(codec, frame((MAX_CONTAINERS - 6) // per_part, scalar), 1 << 24)
    over = frame((MAX_CONTAINERS + 1) // per_part)
    error = refusal(over, 1 << 24)
    assert str(error).startswith(f"the request: got more than {MAX_CONTAINERS} lists and maps")


def test_the_number_of_strings_in_json_has_a_limit() -> None:
    frame = b'{"prompt": ["%b"]}' % b'","'.join([b"\\"] * (2 * MAX_STRINGS + 1))
    assert "or 262144 strings" in str(refusal(frame, 1 << 24))


def test_parts_of_broken_frames_are_counted_in_linear_time() -> None:
    for frame in (
        b'{"x":"' + b'\\"' * 1_000_000 + b"[" * (MAX_CONTAINERS + 1),
        b'"' * 200_000 + b"[" * MAX_CONTAINERS,
        b"\xdd" * 1_000_000,
        b"\xdb\xff\xff\xff\xff" * 100_000,
        b"\xc1" * 100_000,
    ):
        assert isinstance(refusal(frame, 1 << 24), RefusedError)


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
