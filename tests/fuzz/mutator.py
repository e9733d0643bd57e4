"""Frames that are nearly messages: valid ones with a few faults in their bytes or structure."""

from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec
from msgspec import Raw

from penstock.protocol.messages.client import MSGPACK, codec_of
from penstock.protocol.transport.channel import DECODE_ERRORS

Place = tuple[Any, Any]
"""a list or map, and the index or key of something in it"""

VALUES: list[Any] = [
    *(None, True, False, 0, -1, 0.5, -0.5, 1e308),
    *("", "x", "\0", "é🙂", "</s>", b"", b"123", bytes(8)),
    *(2**31 - 1, 2**31, -(2**31) - 1, 2**32, 2**63 - 1, -(2**63), 2**64 - 1),
    *([], {}, [None], [[]], [0] * 100, ["x"] * 20, {"x": 1}, [{"role": "user", "content": ""}]),
    *([2**31], [-1], [264], b"\xff" * 8, b"\xff\xff\xff\x7f" * 2),
]
LONG_VALUES: list[Any] = ["x" * 70_000, "🙂" * 2_000, [0] * 10_000, [2**40] * 2_000, bytes(40_000)]
MSGPACK_VALUES = [
    b"\xcb\x7f\xf8" + bytes(6),  # NaN
    b"\xcb\x7f\xf0" + bytes(6),  # infinity
    b"\xca\xff\x80" + bytes(2),  # -infinity
    b"\xa2\xff\xfe",  # no UTF-8
    b"\xa3\xed\xa0\x80",  # a lone surrogate
    b"\xdd\xff\xff\xff\xff",  # a list of 2**32 - 1 items, which are not there
    b"\xdf\xff\xff\xff\xff",  # a map
    b"\xdb\xff\xff\xff\xff",  # a string
    b"\xc6\xff\xff\xff\xff",  # bytes
    b"\xd6\xff" + bytes(4),  # a time
    b"\xd4\x05\x00",  # an extension
    b"\xc1",  # never used
    b"\x81\x80\x01",  # a map as a key
]
JSON_VALUES = [
    *(b"NaN", b"-Infinity", b"1e999", b"-0", b"1E5", b"9" * 400, b"9" * 5000, b"0." + b"3" * 400),
    *(b'"\xff\xfe"', b'"\\ud800"', b'"\\u0000"', b'"\\udc00\\ud800"', b'"', b"tru", b"01", b""),
]


class Mutator:
    """Makes frames from `frames`: the same ones for the same seed."""

    def __init__(self, seed: int | str, frames: list[bytes]) -> None:
        self._rng = Random(seed)
        self._frames = frames
        self._ways = [self._flip, self._cut, self._repeat, self._insert, self._splice]

    def frames(self, number: int) -> Iterator[bytes]:
        """Yield `number` frames, each with one to four faults; most faults are of structure."""
        rng = self._rng
        for _ in range(number):
            frame = rng.choice(self._frames)
            for _ in range(rng.choice((1, 1, 2, 4))):
                way = self._restructure if rng.random() < 0.6 else rng.choice(self._ways)
                frame = way(frame)
            yield frame

    # ---- bytes -------------------------------------------------------------------------------

    def _flip(self, frame: bytes) -> bytes:
        flipped = bytearray(frame)
        for _ in range(self._rng.choice((1, 1, 1, 8)) if frame else 0):
            flipped[self._rng.randrange(len(frame))] ^= 1 << self._rng.randrange(8)
        return bytes(flipped)

    def _cut(self, frame: bytes) -> bytes:
        begin, end = self._range(frame)
        return self._rng.choice((frame[:begin], frame[begin:], frame[:begin] + frame[end:]))

    def _repeat(self, frame: bytes) -> bytes:
        begin, end = self._range(frame)
        return frame[:end] + frame[begin:end] * self._rng.choice((1, 2, 20)) + frame[end:]

    def _insert(self, frame: bytes) -> bytes:
        at, _ = self._range(frame)
        return frame[:at] + self._rng.randbytes(self._rng.choice((1, 2, 4, 8))) + frame[at:]

    def _splice(self, frame: bytes) -> bytes:
        other = self._rng.choice(self._frames)
        return frame[: self._range(frame)[0]] + other[self._range(other)[0] :]

    def _range(self, frame: bytes) -> tuple[int, int]:
        begin = self._rng.randint(0, len(frame))
        return begin, min(len(frame), begin + self._rng.randint(0, 16))

    # ---- structure ---------------------------------------------------------------------------

    def _restructure(self, frame: bytes) -> bytes:
        """Another value, another key, one less, or one twice, anywhere in a message."""
        is_msgpack = codec_of(frame) is MSGPACK
        try:
            root = [codec_of(frame).decode_any(frame)]
            self._change(*self._rng.choice(list(_places(root))), is_msgpack)
            return _encode(root[0], is_msgpack) if root else b""
        except (*DECODE_ERRORS, OverflowError):  # by an earlier fault it has no structure
            return self._flip(frame)

    def _change(self, container: Any, key: Any, is_msgpack: bool) -> None:
        way, value = self._rng.random(), container[key]
        if way < 0.2 and isinstance(value, dict) and value:
            container[key] = self._with_a_key_twice(value, is_msgpack)
        elif way < 0.3 and isinstance(container, dict):
            name = self._rng.choice(("type", "request_id", "prompt", "", "x" * 40))
            container[name] = container.pop(key)
        elif way < 0.4:
            del container[key]
        elif way < 0.5 and isinstance(container, list):
            container.insert(key, value)
        else:
            container[key] = self._value(is_msgpack)

    def _with_a_key_twice(self, fields: dict[Any, Any], is_msgpack: bool) -> Raw:
        """Return a map in which one key stands for two values."""
        pairs = [*fields.items(), (self._rng.choice(list(fields)), self._value(is_msgpack))]
        self._rng.shuffle(pairs)
        items = [(_encode(key, is_msgpack), _encode(value, is_msgpack)) for key, value in pairs]
        if is_msgpack:
            return Raw(b"\xde" + len(items).to_bytes(2, "big") + b"".join(k + v for k, v in items))
        return Raw(b"{" + b",".join(k + b":" + v for k, v in items) + b"}")

    def _value(self, is_msgpack: bool) -> Any:
        rng, kind = self._rng, self._rng.random()
        if kind < 0.65:
            return rng.choice(VALUES)
        if kind < 0.66:
            return rng.choice(LONG_VALUES)
        if kind < 0.7:
            depth = rng.choice((2, 50, rng.randint(950, 1000), 3000))
            return Raw(b"\x91" * depth + b"\x01" if is_msgpack else b"[" * depth + b"]" * depth)
        return Raw(rng.choice(MSGPACK_VALUES if is_msgpack else JSON_VALUES))


def _places(container: Any) -> Iterator[Place]:
    """Every place in a list or map, and in those inside."""
    keys = container if isinstance(container, dict) else range(len(container))
    for key in list(keys):
        yield container, key
        if isinstance(container[key], dict | list):
            yield from _places(container[key])


def _encode(value: Any, is_msgpack: bool) -> bytes:
    return msgspec.msgpack.encode(value) if is_msgpack else msgspec.json.encode(value)
