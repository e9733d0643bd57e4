"""Finds tool calls in an answer, while the text comes."""

import json
import re
import uuid

import msgspec
from msgspec import Raw, Struct

from penstock.services.http.reasoning import tag_start

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_BEGUN_CALL = re.compile(
    r"""\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")"""
    r"""(?:\s*,\s*"arguments"\s*:\s*(?P<arguments>.*)|[^}]*$)""",
    re.DOTALL,
)


class ContentPiece(Struct, frozen=True):
    """More of the answer's text."""

    text: str


class ToolCallDelta(Struct, frozen=True):
    """More of one call, as OpenAI streams it: its id and name first, then its arguments."""

    index: int
    """of the call in the answer"""
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    """the next piece of their JSON text"""


Piece = ContentPiece | ToolCallDelta


class _Call(Struct):
    name: str
    arguments: Raw = Raw(b"{}")

    def __post_init__(self) -> None:
        if not bytes(self.arguments).startswith(b"{"):
            raise ValueError("arguments are a map")


def _first_value(text: str) -> str:
    """The JSON value that `text` begins with; all of it if the value has no end."""
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return text
    return text[:end]


class ToolCallParser:
    """Reads Hermes's form: `<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>`.

    A call is given when its end has come, since only then it is known to be one: what stands
    between the tags and is no call is given back as text, with its tags. Newlines around a call
    belong to nothing. What may be the beginning of a tag, or newlines before it, is held back.
    """

    def __init__(self, is_forced: bool = False) -> None:
        """is_forced: the answer is nothing but calls, so that a cut-off one is never text."""
        self._is_forced = is_forced
        self._held = ""
        self._num_calls = 0
        self._is_behind_call = False

    def feed(self, content: str) -> list[Piece]:
        """The text and the calls that `content` adds."""
        self._held += content
        pieces: list[Piece] = []
        before, opening, inside = self._held.partition(_OPEN)
        while opening and _CLOSE in inside:
            body, _, self._held = inside.partition(_CLOSE)
            pieces += self._read(before, body)
            before, opening, inside = self._held.partition(_OPEN)
        start = tag_start(before, _OPEN)
        pieces += self._text(before[:start])
        self._held = self._held[start:]
        return pieces

    def finish(self, is_cut: bool = False) -> list[Piece]:
        """What was held back. A call without an end is text, unless the answer was cut off in it
        (`is_cut`): it is a call then, with as much of its arguments as there is."""
        rest, self._held = self._held, ""
        before, opening, inside = rest.partition(_OPEN)
        if is_cut and opening and (begun := _BEGUN_CALL.match(inside)):
            arguments = _first_value(begun["arguments"] or "")
            return self._call(before, msgspec.json.decode(begun["name"]), arguments)
        if is_cut and self._is_forced:
            return self._text(before.rstrip("\n")) if opening else []
        return self._text(rest)

    def _call(self, before: str, name: str, arguments: str) -> list[Piece]:
        text = self._text(before.rstrip("\n"))
        index, self._num_calls = self._num_calls, self._num_calls + 1
        self._is_behind_call = True
        named = ToolCallDelta(index, f"call_{uuid.uuid4().hex}", name)
        return [*text, named, ToolCallDelta(index, arguments=arguments)]

    def _read(self, before: str, body: str) -> list[Piece]:
        try:
            call = msgspec.json.decode(body, type=_Call)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return self._text(f"{before}{_OPEN}{body}{_CLOSE}")
        return self._call(before, call.name, bytes(call.arguments).decode())

    def _text(self, text: str) -> list[Piece]:
        if self._is_behind_call:
            text = text.lstrip("\n")
            self._is_behind_call = not text
        return [ContentPiece(text)] if text else []
