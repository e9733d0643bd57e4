"""Readers of one tool call in JSON: as Qwen3 writes it, in tags, and without tags."""

import re
from typing import Protocol

import msgspec
from msgspec import Raw, Struct

from penstock.services.http.shared.tool_format import CLOSING

_STRING = r'"(?:[^"\\\x00-\x1f]|\\.){0,256}"'
_HEAD = re.compile(
    rf'\s*\{{\s*"name"\s*:\s*(?P<name>{_STRING})\s*'
    r'(?P<begins>,\s*"(?:arguments|parameters)"\s*:\s*(?=\{))?'
)
_KEYS = ("arguments", "parameters")
_BARE_HEAD = '{"name":"'
_OUTSIDE, _INSIDE = re.compile(r'["{}\[\]<]'), re.compile(r'["\\\x00-\x1f]')


class Name(Struct, frozen=True):
    """The beginning of a call."""

    name: str


class Arguments(Struct, frozen=True):
    """A piece of the JSON text of a call's arguments."""

    text: str


Event = str | Name | Arguments
"""part of a call; a string is text that belongs to no call"""


class CallReader(Protocol):
    """Reads one call from the text after its opening tag."""

    is_done: bool
    """the call has ended, before the text that `feed` did not use"""
    is_refused: bool
    """the text is not a call"""

    def feed(self, text: str) -> tuple[list[Event], str]:
        """Return what `text` holds, and its end that can't be decided yet."""

    def finish(self, text: str, is_cut: bool) -> list[Event]:
        """Return what `text` holds where the answer ends; is_cut: by `max_tokens` or an abort."""


class JsonScanner:
    """Finds the end of a JSON object or array. It compares brackets and skips strings."""

    def __init__(self, open_brackets: str = "") -> None:
        self._open = list(open_brackets)
        self._in_string = self._is_escaped = False
        self.is_closed = False
        self.is_broken = False
        """a bracket does not match, a string has a line break, or a tag is outside strings"""

    def scan(self, text: str) -> int:
        """Return the number of characters before the value's end, or before the first mistake."""
        position = 0
        while position < len(text) and not (self.is_closed or self.is_broken):
            if self._is_escaped:
                position, self._is_escaped = position + 1, False
            elif found := (_INSIDE if self._in_string else _OUTSIDE).search(text, position):
                self._take(found[0])
                position = found.start() if self.is_broken else found.end()
            else:
                position = len(text)
        return position

    def _take(self, character: str) -> None:
        if character == '"':
            self._in_string = not self._in_string
        elif self._in_string:
            self._is_escaped = character == "\\"
            self.is_broken = not self._is_escaped
        elif character in "{[":
            self._open.append(character)
        elif not self._open or self._open.pop() + character not in ("{}", "[]"):
            self.is_broken = True
        else:
            self.is_closed = not self._open


class JsonReader:
    """Reads `{"name": …, "arguments": {…}}`; a call begins with its arguments' brace."""

    def __init__(self) -> None:
        self.is_done = self.is_refused = False
        self._read = self._read_head
        self._scanner = JsonScanner()
        self._num_scanned = 0

    def feed(self, text: str) -> tuple[list[Event], str]:
        events: list[Event] = []
        while text and not (self.is_done or self.is_refused):
            read = self._read
            some, text = read(text)
            events += some
            if self._read == read:
                break
        return events, text

    def finish(self, text: str, is_cut: bool) -> list[Event]:
        if self._read == self._read_tail:
            rest = text[: tag_start(text, CLOSING)]
            return [rest] if rest.strip() not in ("", "}") else []
        if self._read != self._read_head:
            return []
        begun = _HEAD.match(text) if is_cut else None
        rest = "".join(text[begun.end() :].split()) if begun else ""
        is_call = begun and any(f',"{key}":'.startswith(rest) for key in _KEYS)
        name = _decoded(begun["name"]) if begun and is_call else None
        self.is_refused = name is None
        return [] if name is None else [Name(name)]

    def _is_possible(self, start: str) -> bool:
        """Return whether text that begins like this may be a call without tags."""
        start = "".join(start.split())[: len(_BARE_HEAD)]
        return _BARE_HEAD.startswith(start)

    def _read_head(self, text: str) -> tuple[list[Event], str]:
        """Begin a call with its arguments or, where its name comes later, with its end."""
        if (begun := _HEAD.match(text)) and begun["begins"] and (name := _decoded(begun["name"])):
            self._read, self._scanner = self._read_arguments, JsonScanner()
            return [Name(name)], text[begun.end() :]
        if not self._is_possible(text[:200].lstrip()):
            self.is_refused = True
            return [], text
        self._num_scanned += self._scanner.scan(text[self._num_scanned :])
        if self._scanner.is_closed:
            return self._read_whole(text[: self._num_scanned], text[self._num_scanned :])
        self.is_refused = self._scanner.is_broken
        return [], text

    def _read_whole(self, body: str, rest: str) -> tuple[list[Event], str]:
        if call := _whole_call(body):
            self._begin_tail()
            return call, "}" + rest
        self.is_refused = True
        return [], body + rest

    def _begin_tail(self) -> None:
        self._read, self._scanner, self._num_scanned = self._read_tail, JsonScanner("{"), 0

    def _read_arguments(self, text: str) -> tuple[list[Event], str]:
        length = self._scanner.scan(text)
        if self._scanner.is_closed:
            self._begin_tail()
        elif self._scanner.is_broken:
            self._read = self._read_broken
        return _arguments(text[:length]), text[length:]

    def _read_broken(self, text: str) -> tuple[list[Event], str]:
        """Read arguments that are not JSON, as they were written."""
        return _arguments(text), ""

    def _read_tail(self, text: str) -> tuple[list[Event], str]:
        """Drop the end of the object and its other members; anything else is text."""
        self._num_scanned += self._scanner.scan(text[self._num_scanned :])
        self.is_done = self._scanner.is_closed or self._scanner.is_broken
        if not self.is_done:
            return [], text
        body = text[: self._num_scanned]
        return _after_object(body), text[self._num_scanned :]


class HermesReader(JsonReader):
    """Reads Hermes's form: `<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>`."""

    def _is_possible(self, start: str) -> bool:
        return not start or start.startswith("{")

    def _read_broken(self, text: str) -> tuple[list[Event], str]:
        body, tag, rest = text.partition(CLOSING)
        self.is_done = bool(tag)
        length = len(body.rstrip("\n")) if tag else tag_start(text, CLOSING)
        return _arguments(text[:length]), rest if tag else text[length:]

    def _read_tail(self, text: str) -> tuple[list[Event], str]:
        body, tag, rest = text.partition(CLOSING)
        if not tag:
            return [], text
        self.is_done = True
        return _after_object(body), rest


def tag_start(text: str, tag: str) -> int:
    """Return the start of the newlines and the beginning of `tag` that `text` may end with."""
    length = next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)
    return len(text[: len(text) - length].rstrip("\n"))


def _arguments(text: str) -> list[Event]:
    return [Arguments(text)] if text else []


def _whole_call(text: str) -> list[Event] | None:
    """Return the events of a call whose name need not come first; None if it is not a call."""
    try:
        call = msgspec.json.decode(text, type=dict[str, Raw])
        name = msgspec.json.decode(call["name"], type=str)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, KeyError):
        return None
    given = [bytes(call[key]).decode() for key in _KEYS if key in call]
    if len(call) > 1 and not (given and given[0].startswith("{")):
        return None
    return [Name(name), Arguments(given[0] if given else "{}")]


def _after_object(text: str) -> list[Event]:
    """Return what comes after the end of an object, and after its other members."""
    try:
        msgspec.json.decode('{"a":0' + text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        rest = text.lstrip().removeprefix("}").lstrip()
        return [rest] if rest else []
    return []


def _decoded(name: str) -> str | None:
    try:
        return msgspec.json.decode(name, type=str)
    except (msgspec.MsgspecError, UnicodeError):
        return None
