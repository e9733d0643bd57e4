"""Tool calls in the form of Qwen3-Coder: `<function=name>` with `<parameter=key>` elements."""

import re
from collections.abc import Mapping
from typing import Any

from penstock.services.http.generation.argument_values import ArgumentSchema, encoded
from penstock.services.http.generation.tool_call_reader import Arguments, Event, Name, tag_start
from penstock.services.http.shared.tool_format import CLOSING, FUNCTION

END_FUNCTION = "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
# what ends a value; models sometimes leave `</parameter>` out
VALUE_ENDS = (END_PARAMETER, f"\n{PARAMETER}", f"\n{END_FUNCTION}")
_MAX_NAME = 256
_FUNCTION = re.compile(r"\s*<function=([^<>\n]{1,256})>")
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]{1,256})>\n?")


class XmlReader:
    """Reads one call. Values of strings are sent as they come, others when they are whole.

    The arguments become JSON by the function's schema.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self.is_done = self.is_refused = False
        self._schemas = schemas
        self._arguments = ArgumentSchema({})
        self._read = self._read_function
        self._separator = "{"  # before the next argument
        self._schema: Any = True  # of the argument that is being read

    def feed(self, text: str) -> tuple[list[Event], str]:
        events: list[Event] = []
        while text and not (self.is_done or self.is_refused):
            read, length = self._read, len(text)
            some, text = read(text)
            events += some
            if self._read == read and len(text) == length:
                break
        return events, text

    def finish(self, text: str, is_cut: bool) -> list[Event]:
        if self._read == self._read_function:
            self.is_refused = True
            return []
        if self._read in (self._read_text, self._read_value):
            return self._finish_value(text, is_cut)
        if self._read != self._read_element:
            return []
        if is_cut:  # a parameter has begun if its tag is whole
            return self._read_element(text + "\n")[0] if _PARAMETER.fullmatch(text) else []
        return [*([text] if text.strip() else []), self._end()]

    def _end(self) -> Arguments:
        return Arguments("{}" if self._separator == "{" else "}")

    def _value(self, text: str) -> str:
        return self._arguments.value(self._schema, text)

    def _finish_value(self, text: str, is_cut: bool) -> list[Event]:
        is_text = self._read == self._read_text
        value = text[: min(tag_start(text, end) for end in VALUE_ENDS)]
        if is_cut:
            return [Arguments(_escaped(value) if is_text else value)] if value else []
        last = f'{_escaped(value)}"' if is_text else self._value(value)
        return [Arguments(last + "}")]

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
        """Begin a parameter, or end the call. Anything else is text."""
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
        if (length := _value_length(text)) is not None:
            self._read = self._read_value_end
            return [Arguments(f'{_escaped(text[:length])}"')], text[length:]
        length = min(tag_start(text, end) for end in VALUE_ENDS)
        return ([Arguments(_escaped(text[:length]))] if length else []), text[length:]

    def _read_value(self, text: str) -> tuple[list[Event], str]:
        if (length := _value_length(text)) is None:
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
    """Return whether more text may make an element of this one."""
    if start.startswith(PARAMETER):
        name = start[len(PARAMETER) :]
        return len(name) < _MAX_NAME and not re.search(r"[<>\n]", name)
    return any(tag.startswith(start) for tag in (PARAMETER, END_FUNCTION, CLOSING))


def _value_length(text: str) -> int | None:
    """Return the length of a value; None if its end is not there yet."""
    ends = [(at, tag) for tag in VALUE_ENDS if (at := text.find(tag)) >= 0]
    if not ends:
        return None
    end, tag = min(ends)
    return len(text[:end].removesuffix("\n")) if tag == END_PARAMETER else end


def _escaped(text: str) -> str:
    return encoded(text)[1:-1]
