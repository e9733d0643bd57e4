"""Readers of one tool call: in JSON, with or without tags, and in the XML of Qwen3-Coder."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import Raw, Struct

from penstock.services.http.generation.argument_values import ArgumentSchema, encoded
from penstock.services.http.shared.app_state import CLOSING, FUNCTION

_STRING = r'"(?:[^"\\\x00-\x1f]|\\.){0,256}"'
_HEAD = re.compile(
    rf'\s*(?:\[\s*)?\{{\s*"name"\s*:\s*(?P<name>{_STRING})\s*'
    r'(?P<begins>,\s*"(?:arguments|parameters)"\s*:\s*(?=\{))?'
)
_KEYS = ("arguments", "parameters")
# text that may precede a call in tags, and text between two calls
_ARRAY, _SEPARATOR = re.compile(r"\s*(?:\[\s*)?"), re.compile(r"[\s,;]*")
_BARE_HEAD = '{"name":"'
_CONTROL, _LINE_END = re.compile(r"[\x00-\x1f]"), "\n" + CLOSING
_OUTSIDE, _INSIDE = re.compile(r'["{}\[\]<]'), re.compile(r'["\\\x00-\x1f]')
END_FUNCTION = "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
# texts that end a value; models sometimes leave `</parameter>` out
VALUE_ENDS = (END_PARAMETER, f"\n{PARAMETER}", f"\n{END_FUNCTION}")
# texts that may follow a value, after white space: before others, `</parameter>` is part of a value
_AFTER_VALUE = (PARAMETER, END_PARAMETER, END_FUNCTION, CLOSING)
FORCED_VALUE_END = f"\n{END_PARAMETER}\n"  # the end of a value in the grammar of a forced call
_MAX_NAME = 256
_FUNCTION = re.compile(r"\s*<function=([^<>\n]{1,256})>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]{1,256})>\n?")


class Name(Struct, frozen=True):
    """The beginning of a call."""

    name: str


class Arguments(Struct, frozen=True):
    """A piece of the JSON text of a call's arguments."""

    text: str


Event = str | Name | Arguments  # part of a call; a string is text that belongs to no call


class CallReader(ABC):
    """Reader of one call, from the text after its opening tag."""

    def __init__(self, read: Callable[[str], tuple[list[Event], str]]) -> None:
        """Start a call. read: reads its first part, as `feed` does, and sets its own successor."""
        self.is_done = False  # True if the call has ended, before the text that `feed` did not use
        self.is_refused = False  # True if the text is not a call
        self._read = read

    def feed(self, text: str) -> tuple[list[Event], str]:
        """Return the events in `text`, and the end of `text` that is still undecided."""
        events: list[Event] = []
        while text and not (self.is_done or self.is_refused):
            read, length = self._read, len(text)
            some, text = read(text)
            events += some
            if self._read == read and len(text) == length:
                break
        return events, text

    @abstractmethod
    def finish(self, text: str, is_cut: bool) -> list[Event]:
        """Return the events of the final `text`. is_cut: `max_tokens` or an abort ended it."""


class JsonScanner:
    """Scanner for the end of a JSON object or array: compares brackets, and skips strings."""

    def __init__(self, open_brackets: str = "", lenient_depth: int = 1) -> None:
        """Start a scan. lenient_depth: open brackets from which strings may have line breaks."""
        self._open, self._lenient_depth = list(open_brackets), lenient_depth
        self._in_string = self._is_escaped = False
        self.is_closed = False
        # True if a bracket does not match, a tag is outside strings, or a string does not end
        self.is_broken = False

    def scan(self, text: str) -> tuple[int, str]:
        """Return the number of characters before the value's end or first mistake, and their JSON.

        In the JSON text, control characters in strings are escaped. A line break at the end of the
        text is not scanned, because before `</tool_call>` it shows that a string does not end.
        """
        position, parts = 0, []
        while position < len(text) and not (self.is_closed or self.is_broken):
            if self._is_escaped:
                character = text[position]
                parts.append(_escaped(character)[character < " " :])  # after its backslash
                position, self._is_escaped = position + 1, False
                continue
            found = (_INSIDE if self._in_string else _OUTSIDE).search(text, position)
            at = found.start() if found else len(text)
            parts.append(text[position:at])
            position = at
            if not found:
                break
            if (
                found[0] == "\n"
                and self._in_string
                and _LINE_END.startswith(text[at : at + len(_LINE_END)])
            ):
                self.is_broken = len(text) - at >= len(_LINE_END)
                break
            self._take(found[0])
            if not self.is_broken:
                parts.append(_escaped(found[0]))
                position += 1
        return position, "".join(parts)

    def _take(self, character: str) -> None:
        if character == '"':
            self._in_string = not self._in_string
        elif self._in_string:
            self._is_escaped = character == "\\"
            self.is_broken = not self._is_escaped and len(self._open) < self._lenient_depth
        elif character in "{[":
            self._open.append(character)
        elif not self._open or self._open.pop() + character not in ("{}", "[]"):
            self.is_broken = True
        else:
            self.is_closed = not self._open


class JsonReader(CallReader):
    """Reader of `{"name": …, "arguments": {…}}`; a call begins with its arguments' brace.

    In the tags of Hermes and Qwen3, `</tool_call>` ends even a broken call.
    """

    def __init__(self, in_tags: bool) -> None:
        super().__init__(self._read_head)
        self._in_tags = in_tags
        self._scanner = JsonScanner(lenient_depth=2)
        self._num_scanned = 0
        self._body = ""  # scanned text as JSON
        self._is_array = False

    def finish(self, text: str, is_cut: bool) -> list[Event]:
        if self._read == self._read_tail:
            rest = text[: tag_start(text, CLOSING)]
            return self._after_object(rest) if rest.strip() not in ("", "}") else []
        if self._read == self._read_arguments:  # a line break in a string that was cut off
            return _arguments(_escaped(text))
        if self._read != self._read_head:
            return []
        begun = _HEAD.match(text) if is_cut else None
        rest = "".join(text[begun.end() :].split()) if begun else ""
        is_call = begun and any(f',"{key}":'.startswith(rest) for key in _KEYS)
        name = _decoded(begun["name"]) if begun and is_call else None
        self.is_refused = name is None
        return [] if name is None else [Name(name)]

    def _is_possible(self, start: str) -> bool:
        """Return whether text with this beginning may be a call."""
        if self._in_tags:
            return not start or start.startswith("{")
        start = "".join(start.split())[: len(_BARE_HEAD)]
        return _BARE_HEAD.startswith(start)

    def _read_head(self, text: str) -> tuple[list[Event], str]:
        """Begin a call with its arguments or, if its name follows them, with its end."""
        if (begun := _HEAD.match(text)) and begun["begins"] and (name := _decoded(begun["name"])):
            self._read, self._scanner = self._read_arguments, JsonScanner()
            self._is_array = "[" in text[: begun.start("name")]
            return [Name(name)], text[begun.end() :]
        start = len(found[0]) if (found := _ARRAY.match(text)) else 0
        if not self._is_possible(text[start : start + 200]):
            self.is_refused = True
            return [], text
        length, scanned = self._scanner.scan(text[start + self._num_scanned :])
        self._num_scanned, self._body = self._num_scanned + length, self._body + scanned
        if not self._scanner.is_closed:
            self.is_refused = self._scanner.is_broken
            return [], text
        call = _whole_call(self._body)
        if call is None:
            self.is_refused = True
            return [], text
        rest = text[start + self._num_scanned :]
        self._is_array = "[" in text[:start]
        self._begin_tail()
        return call, "}" + rest

    def _begin_tail(self) -> None:
        self._read, self._scanner = self._read_tail, JsonScanner("{", lenient_depth=2)
        self._num_scanned = 0

    def _read_arguments(self, text: str) -> tuple[list[Event], str]:
        length, scanned = self._scanner.scan(text)
        if self._scanner.is_closed:
            self._begin_tail()
        elif self._scanner.is_broken:
            self._read = self._read_broken
        return _arguments(scanned), text[length:]

    def _read_broken(self, text: str) -> tuple[list[Event], str]:
        """Read arguments that are not JSON without changing them."""
        if not self._in_tags:
            return _arguments(text), ""
        body, tag, rest = text.partition(CLOSING)
        self.is_done = bool(tag)
        length = len(body.rstrip("\n")) if tag else tag_start(text, CLOSING)
        return _arguments(text[:length]), rest if tag else text[length:]

    def _read_tail(self, text: str) -> tuple[list[Event], str]:
        """Drop the end of the object and its other members; other characters are text."""
        if self._in_tags:
            body, tag, rest = text.partition(CLOSING)
            self.is_done = bool(tag)
            return (self._after_object(body), rest) if tag else ([], text)
        self._num_scanned += self._scanner.scan(text[self._num_scanned :])[0]
        self.is_done = self._scanner.is_closed or self._scanner.is_broken
        if not self.is_done:
            return [], text
        body = text[: self._num_scanned]
        return self._after_object(body), text[self._num_scanned :]

    def _after_object(self, text: str) -> list[Event]:
        """Return the events after a call's arguments; further members of its object are dropped.

        Models put further calls into one tag, with or without an array around these calls.
        """
        scanner = JsonScanner("{", lenient_depth=2)
        length, scanned = scanner.scan(text)
        if not _decoded('{"a":0' + scanned, Raw):
            rest = text.lstrip().removeprefix("}").lstrip()
            return [rest] if rest else []
        events: list[Event] = []
        rest = text[length:]
        while (found := _SEPARATOR.match(rest)) and rest[found.end() :].startswith("{"):
            length, scanned = JsonScanner(lenient_depth=2).scan(rest[found.end() :])
            call = _whole_call(scanned)
            if call is None:
                break
            events += call
            rest = rest[found.end() + length :]
        rest = rest.lstrip()
        rest = rest.removeprefix("]").lstrip() if self._is_array else rest
        return [*events, rest] if rest else events


def tag_start(text: str, tag: str) -> int:
    """Return the index of a partial `tag`, with newlines in front, at the end of `text`."""
    length = next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)
    return len(text[: len(text) - length].rstrip("\n"))


def _arguments(text: str) -> list[Event]:
    return [Arguments(text)] if text else []


def _whole_call(text: str) -> list[Event] | None:
    """Return the events of a call, whose name need not come first; None if it is not a call."""
    try:
        call = msgspec.json.decode(text, type=dict[str, Raw])
        name = msgspec.json.decode(call["name"], type=str)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, KeyError):
        return None
    given = next((bytes(call[key]).decode() for key in _KEYS if key in call), None)
    if given is None and len(call) > 1:
        return None
    arguments = "{}" if given is None else _object(given)
    return None if arguments is None else [Name(name), Arguments(arguments)]


def _object(given: str) -> str | None:
    """Return arguments as JSON: an object, nothing, or the text of either; otherwise None."""
    if given.startswith('"'):
        _, given = JsonScanner().scan(msgspec.json.decode(given, type=str).strip())
        given = given if _decoded(given, Raw) or not given else "invalid"
    return "{}" if given in ("", "null") else given if given.startswith("{") else None


def _escaped(text: str) -> str:
    """Return text for a JSON string, with control characters escaped."""
    return _CONTROL.sub(lambda found: msgspec.json.encode(found[0]).decode()[1:-1], text)


def _decoded(text: str, form: Any = str) -> Any:
    """Return JSON as `form`; None if it is not."""
    try:
        return msgspec.json.decode(text, type=form)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None


class XmlReader(CallReader):
    """Reader of one XML call. Strings are sent as they arrive, other values when complete.

    The function's schema determines the JSON types of the arguments.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]], is_forced: bool = False) -> None:
        """Start a call. is_forced: it follows a grammar, in which values have one end."""
        super().__init__(self._read_function)
        self._schemas = schemas
        self._find_end = _find_forced_end if is_forced else _find_end
        self._arguments = ArgumentSchema({})
        self._separator = "{"  # text before the next argument
        self._schema: Any = True  # schema of the current argument

    def finish(self, text: str, is_cut: bool) -> list[Event]:
        if self._read == self._read_function:
            self.is_refused = True
            return []
        if self._read in (self._read_text, self._read_value):
            return self._finish_value(text, is_cut)
        if self._read != self._read_element:
            return []
        if is_cut:  # a parameter has begun if its tag is complete
            return self._read_element(text + "\n")[0] if _PARAMETER.fullmatch(text) else []
        return [*([text] if text.strip() else []), self._end()]

    def _end(self) -> Arguments:
        return Arguments("{}" if self._separator == "{" else "}")

    def _value(self, text: str) -> str:
        return self._arguments.value(self._schema, text)

    def _finish_value(self, text: str, is_cut: bool) -> list[Event]:
        is_text = self._read == self._read_text
        length, has_ended = self._find_end(text)
        value = text[:length]
        if is_cut and has_ended is False:
            return [Arguments(_in_string(value) if is_text else value)] if value else []
        last = f'{_in_string(value)}"' if is_text else self._value(value)
        return [Arguments(last if is_cut else last + "}")]

    def _read_function(self, text: str) -> tuple[list[Event], str]:
        if begun := _FUNCTION.match(text):
            self._arguments = ArgumentSchema(self._schemas.get(begun[1].strip(), {}))
            self._read = self._read_element
            return [Name(begun[1].strip())], text[begun.end() :]
        start = text.lstrip()
        is_begun = start.startswith(FUNCTION) and len(start) < len(FUNCTION) + _MAX_NAME
        is_begun = is_begun and not re.search(r"[<>\n]", start[len(FUNCTION) :])
        self.is_refused = not (is_begun or FUNCTION.startswith(start))
        return [], text

    def _read_element(self, text: str) -> tuple[list[Event], str]:
        """Begin a parameter, or end the call. Other characters are text."""
        begun = _PARAMETER.match(text)
        if begun and (begun.end() < len(text) or text.endswith("\n")):
            key = begun[1].strip()
            self._schema = self._arguments.of(key)
            is_text = self._arguments.is_text(self._schema)
            self._read = self._read_text if is_text else self._read_value
            begin = f"{self._separator}{encoded(key)}: " + ('"' if is_text else "")
            self._separator = ", "
            return [Arguments(begin)], text[begun.end() :]
        start = text.lstrip()
        for tag in (END_FUNCTION, CLOSING):
            if start.startswith(tag):
                self._read, self.is_done = self._read_tail, tag == CLOSING
                return [self._end()], start[len(tag) :]
        if begun or _is_begun(start):
            return [], text
        other, _, _ = start[1:].partition("<")
        length = len(text) - len(start) + 1 + len(other.rstrip())
        return [text[:length]], text[length:]

    def _read_text(self, text: str) -> tuple[list[Event], str]:
        """Send a string up to its end, without the line break before it."""
        length, has_ended = self._find_end(text)
        if has_ended:
            self._read = self._read_value_end
            return [Arguments(f'{_in_string(text[:length])}"')], text[length:]
        return ([Arguments(_in_string(text[:length]))] if length else []), text[length:]

    def _read_value(self, text: str) -> tuple[list[Event], str]:
        length, has_ended = self._find_end(text)
        if not has_ended:
            return [], text
        self._read = self._read_value_end
        return [Arguments(self._value(text[:length]))], text[length:]

    def _read_value_end(self, text: str) -> tuple[list[Event], str]:
        """Drop the end of a value, up to the next element."""
        self._read = self._read_element
        start = text.removeprefix("\n")
        return [], start.removeprefix(END_PARAMETER)

    def _read_tail(self, text: str) -> tuple[list[Event], str]:
        """Drop `</tool_call>`, which models sometimes leave out."""
        start = text.lstrip()
        if start != CLOSING and CLOSING.startswith(start):
            return [], text
        self.is_done = True
        return [], start.removeprefix(CLOSING) if start.startswith(CLOSING) else text


def _is_begun(start: str) -> bool:
    """Return whether more text may complete this text to an element."""
    if start.startswith(PARAMETER):
        name = start[len(PARAMETER) :]
        return len(name) < _MAX_NAME and not re.search(r"[<>\n]", name)
    return any(tag.startswith(start) for tag in (PARAMETER, END_FUNCTION, CLOSING))


def _find_end(text: str) -> tuple[int, bool | None]:
    """Return the length of a value, and whether its end has arrived; None if more text shows it.

    Before the end, return the length of the text that belongs to the value for certain.
    """
    begin = 0
    while ends := [(at, tag) for tag in VALUE_ENDS if (at := text.find(tag, begin)) >= 0]:
        at, tag = min(ends)
        if tag != END_PARAMETER:
            return at, True
        begin = at + len(tag)
        after = text[begin:].lstrip()
        if after.startswith(_AFTER_VALUE):
            return len(text[:at].removesuffix("\n")), True
        if any(tag.startswith(after) for tag in _AFTER_VALUE):
            return len(text[:at].removesuffix("\n")), None
    return min(tag_start(text, end) for end in VALUE_ENDS), False


def _find_forced_end(text: str) -> tuple[int, bool | None]:
    """Return the same for a value that follows a grammar."""
    at = text.find(FORCED_VALUE_END)
    return (tag_start(text, FORCED_VALUE_END), False) if at < 0 else (at, True)


def _in_string(text: str) -> str:
    return encoded(text)[1:-1]
