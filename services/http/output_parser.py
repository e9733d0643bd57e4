"""Parsers of generated text: reasoning, content and tool calls, piece by piece."""

import json
import re
import uuid

import msgspec
from msgspec import Raw, Struct

_THINK, _END_THINK = "<think>", "</think>"
_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_BEGUN_CALL = re.compile(
    r"""\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")"""
    r"""(?:\s*,\s*"arguments"\s*:\s*(?P<arguments>.*)|[^}]*$)""",
    re.DOTALL,
)


def _tag_start(text: str, tag: str) -> int:
    """Return the start of the newlines and the beginning of `tag` that `text` may end with."""
    length = next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)
    return len(text[: len(text) - length].rstrip("\n"))


class ReasoningSplitter:
    """Splits one answer of Qwen3: `<think>\\n…\\n</think>\\n\\nanswer`.

    Newlines next to the tags belong to neither part. A text that does not begin with `<think>` is
    all answer; one that ends before `</think>` is all reasoning. What may be the beginning of a
    tag, or newlines before it, is held back until the next text decides.

    Args:
        starts_thinking: the prompt ends within `<think>`, so the text begins inside.
    """

    def __init__(self, starts_thinking: bool = False) -> None:
        self._starts_thinking = starts_thinking
        self._held = ""
        self._part = "start"
        self._skips_newlines = starts_thinking

    def feed(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the answer that `text` adds; each may be empty."""
        self._held += text
        reasoning = ""
        if self._part == "start":
            self._begin()
        if self._part == "reasoning":
            inside, tag, after = self._held.partition(_END_THINK)
            if not tag:
                return self._take(_tag_start(inside, _END_THINK)), ""
            reasoning = self._take(len(inside.rstrip("\n")))
            self._part, self._held, self._skips_newlines = "answer", after, True
        return reasoning, self._take(len(self._held)) if self._part == "answer" else ""

    def finish(self) -> tuple[str, str]:
        """Return what was held back, without newlines at the end of reasoning."""
        if self._part == "start":
            self._part = "reasoning" if self._starts_thinking else "answer"
        rest = self._take(len(self._held))
        return (rest.rstrip("\n"), "") if self._part == "reasoning" else ("", rest)

    def _begin(self) -> None:
        start = self._held.lstrip()
        if start.startswith(_THINK):
            self._part, self._held, self._skips_newlines = "reasoning", start[len(_THINK) :], True
        elif not _THINK.startswith(start):
            self._part = "reasoning" if self._starts_thinking else "answer"

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        if self._skips_newlines:
            taken = taken.lstrip("\n")
            self._skips_newlines = not taken
        return taken


class ToolCallDelta(Struct, frozen=True):
    """A piece of one call, as OpenAI streams it: its id and name first, then its arguments."""

    index: int
    """of the call in the answer"""
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    """the next piece of their JSON text"""


Piece = str | ToolCallDelta
"""text, or a piece of a call"""


class _Call(Struct):
    name: str
    arguments: Raw = Raw(b"{}")

    def __post_init__(self) -> None:
        if not bytes(self.arguments).startswith(b"{"):
            raise ValueError("arguments: expected an object")


class ToolCallParser:
    """Reads Hermes's form: `<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>`.

    A call is returned at its end, because only then it is known to be valid; otherwise the text is
    returned with its tags. Newlines around a call are dropped. What may be the beginning of a tag,
    or newlines before it, is held back.
    """

    def __init__(self, is_forced: bool = False) -> None:
        """is_forced: the answer consists of calls only, so a call that is cut off is never text."""
        self._is_forced = is_forced
        self._held = ""
        self._num_calls = 0
        self._is_after_call = False

    def feed(self, content: str) -> list[Piece]:
        """Return the text and the calls that `content` adds."""
        self._held += content
        pieces: list[Piece] = []
        before, opening, inside = self._held.partition(_CALL)
        while opening and _END_CALL in inside:
            body, _, self._held = inside.partition(_END_CALL)
            pieces += self._read(before, body)
            before, opening, inside = self._held.partition(_CALL)
        start = _tag_start(before, _CALL)
        pieces += self._text(before[:start])
        self._held = self._held[start:]
        return pieces

    def finish(self, is_cut: bool = False) -> list[Piece]:
        """Return what was held back.

        is_cut: the answer did not end by itself. A call without an end is then a call with as much
        of its arguments as was generated; otherwise it is text.
        """
        rest, self._held = self._held, ""
        before, opening, inside = rest.partition(_CALL)
        if is_cut and opening and (begun := _BEGUN_CALL.match(inside)):
            arguments = _first_value(begun["arguments"] or "")
            return self._call(before, msgspec.json.decode(begun["name"]), arguments)
        if is_cut and self._is_forced:
            return self._text(before.rstrip("\n")) if opening else []
        return self._text(rest)

    def _call(self, before: str, name: str, arguments: str) -> list[Piece]:
        text = self._text(before.rstrip("\n"))
        index, self._num_calls = self._num_calls, self._num_calls + 1
        self._is_after_call = True
        named = ToolCallDelta(index, f"call_{uuid.uuid4().hex}", name)
        return [*text, named, ToolCallDelta(index, arguments=arguments)]

    def _read(self, before: str, body: str) -> list[Piece]:
        try:
            call = msgspec.json.decode(body, type=_Call)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return self._text(f"{before}{_CALL}{body}{_END_CALL}")
        return self._call(before, call.name, bytes(call.arguments).decode())

    def _text(self, text: str) -> list[Piece]:
        if self._is_after_call:
            text = text.lstrip("\n")
            self._is_after_call = not text
        return [text] if text else []


def _first_value(text: str) -> str:
    """Return the JSON value that `text` begins with; all of it if the value has no end."""
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return text
    return text[:end]
