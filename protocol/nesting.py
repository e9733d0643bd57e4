"""The depth of untyped data, and the number of its parts, which are limited where they come in."""

import re
from collections.abc import Iterable
from typing import Any

from msgspec.structs import astuple

# levels of lists and maps in one field. What recurses over a request on its way (encoders, chat
# templates, grammar compilers) has room for many times as many.
MAX_DEPTH = 64
# lists and maps of a request: one of a byte takes 64 bytes of memory and up to a microsecond
MAX_CONTAINERS = 1 << 16
MAX_STRINGS = 1 << 18  # of a request in JSON, names included
_JSON_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_FIXED = {0: b"\x00-\x7f\xc0\xc2\xc3\xe0-\xff", 1: b"\xcc\xd0", 2: b"\xcd\xd1\xd4"}
# MessagePack: bytes after a head → heads, without strings
_FIXED |= {3: b"\xd5", 4: b"\xca\xce\xd2", 5: b"\xd6", 8: b"\xcb\xcf\xd3", 9: b"\xd7", 17: b"\xd8"}
# scalars of MessagePack in a row, short strings included
_SHORT = re.compile(
    b"(?:%b)*+"
    % b"|".join(
        [b"[%b].{%d}" % (heads, size) for size, heads in _FIXED.items()]
        + [b"%b.{%d}" % (bytes((0xA0 + size,)), size) for size in range(32)]
    ),
    re.DOTALL,
)
_CONTAINERS = re.compile(rb"[\x80-\x9f]++|[\xdc\xde]..|[\xdd\xdf]....", re.DOTALL)
# head of a long string, or the like → bytes of its length
_SIZES = {0xD9: 1, 0xC4: 1, 0xC7: 1, 0xDA: 2, 0xC5: 2, 0xC8: 2, 0xDB: 4, 0xC6: 4, 0xC9: 4}
TOO_MANY_PARTS = (
    f"got more than {MAX_CONTAINERS} lists and maps, or {MAX_STRINGS} strings, expected fewer"
)
_SCALARS = frozenset({str, int, float, bool, type(None), bytes})


def has_too_many_parts(frame: bytes) -> bool:
    """Return whether JSON or MessagePack has more parts than a request may, without decoding it.

    What it can't read, it leaves to the decoder.
    """
    if len(frame) <= MAX_CONTAINERS:
        return False
    return _is_over_in_msgpack(frame) if frame[:1] >= b"\x80" else _is_over_in_json(frame)


def _is_over_in_json(text: bytes) -> bool:
    # the first quote of a string never follows a backslash
    if text.count(b'"') - text.count(b'\\"') > 2 * MAX_STRINGS:
        return True
    if text.count(b"[") + text.count(b"{") <= MAX_CONTAINERS:
        return False
    rest = _JSON_STRING.sub(b"", text)
    return rest.count(b"[") + rest.count(b"{") > MAX_CONTAINERS


def _is_over_in_msgpack(frame: bytes) -> bool:
    position = number = 0
    while (position := _SHORT.match(frame, position).end()) < len(frame):  # type: ignore[union-attr]
        if size := _SIZES.get(frame[position]):
            begin = position + 1
            length = int.from_bytes(frame[begin : begin + size])
            position = begin + size + length + (0xC7 <= frame[position] <= 0xC9)
            continue
        found = _CONTAINERS.match(frame, position)
        if not found:
            return False
        number += found.end() - position if frame[position] < 0xA0 else 1
        position = found.end()
        if number > MAX_CONTAINERS:
            return True
    return False


def is_too_deep(value: object) -> bool:
    """Return True if `value`, as msgspec decodes it, has more than MAX_DEPTH levels."""
    level = [] if type(value) in _SCALARS else [value]
    for _ in range(MAX_DEPTH):
        if not level:
            return False
        level = [child for one in level for child in _children(one) if type(child) not in _SCALARS]
    return bool(level)


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, list):
        return value
    if isinstance(value, dict):
        return value.values()
    return astuple(value) if hasattr(value, "__struct_fields__") else ()
