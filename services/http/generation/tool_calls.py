"""Tool calls in generated text, piece by piece.

A call is sent from the moment its name is known and its arguments begin. So a later mistake can't
make the call text again: the client gets the arguments as the model wrote them. Tags around other
text are text. The pieces add up to the same text and calls for every division of the answer.
"""

import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from penstock.services.http.generation.schema import CalledFunction, CalledTool
from penstock.services.http.generation.tool_call_readers import (
    Arguments,
    CallReader,
    Event,
    JsonReader,
    Name,
    XmlReader,
    tag_start,
)
from penstock.services.http.shared.app_state import FUNCTION, OPENING, FormatName

Schemas = Mapping[str, Mapping[str, Any]]  # JSON schemas of arguments by function
# text that may precede the first call without tags, and text between two calls
_BEFORE, _BETWEEN = re.compile(r"\s*(?:\[\s*)?"), re.compile(r"[\s,;]*")

Piece = str | CalledTool  # text, or a piece of a call: its id and name first, then its arguments


class ToolCallParser(ABC):
    """Parser of an answer. Drops newlines around a call, and moves text within a call after it."""

    def __init__(self, reader: Callable[[], CallReader], is_forced: bool) -> None:
        """Start an answer.

        is_forced: the answer has calls only, so that a call that is cut off is never text.
        """
        self._new_reader = reader
        self._is_forced = is_forced
        self._reader: CallReader | None = None
        self._opening = ""  # tag of the current call, with the newlines before the tag
        self._held = ""
        self._within = ""  # text within the call
        self._num_calls = 0
        self._is_after_call = False

    def feed(self, content: str) -> list[Piece]:
        """Return the text and the calls that `content` adds.

        Newlines after held newlines, in a call all white space, are held without a look: a long run
        would be examined again with each piece.
        """
        blank = None if self._reader else "\n"  # what is held, for `strip`
        is_run = self._held and not (self._held[-1] + content).strip(blank)
        self._held += content
        return [] if is_run else self._examine()

    def _examine(self) -> list[Piece]:
        """Return what is certain of the held text."""
        pieces: list[Piece] = []
        while True:
            if self._reader is None:
                pieces += self._text(self._take_text())
            if self._reader is None:
                return pieces
            events, self._held = self._reader.feed(self._held)
            pieces += self._pieces(events)
            if not self._end_call(pieces):
                return pieces

    def finish(self, is_cut: bool = False) -> list[Piece]:
        """Return the pieces that were held back. is_cut: the answer did not end by itself.

        A call that is cut off keeps the generated part of its arguments.
        """
        pieces = self._examine()  # a run of white space may be left
        rest, self._held = self._held, ""
        if self._reader is None:
            return pieces if is_cut and self._is_forced else pieces + self._text(rest)
        pieces += self._pieces(self._reader.finish(rest, is_cut))
        pieces += self._text(self._within)
        if self._reader.is_refused and not (is_cut and self._is_forced):
            pieces += self._text(self._opening + rest)
        return pieces

    @abstractmethod
    def _take_text(self) -> str:
        """Return the text before the next call, and begin to read the call."""

    @abstractmethod
    def _refused(self) -> list[Piece]:
        """Return text that turned out not to be a call; the text after it is examined again."""

    def _begin_call(self, opening: str, rest: str) -> None:
        self._reader = self._new_reader()
        self._opening, self._held = opening, rest

    def _end_call(self, pieces: list[Piece]) -> bool:
        """Return whether the call has ended or is text, so that the next call may begin."""
        if not self._reader or not (self._reader.is_done or self._reader.is_refused):
            return False
        if self._reader.is_refused:
            pieces += self._refused()
        pieces += self._text(self._within)
        self._reader, self._within = None, ""
        return True

    def _pieces(self, events: list[Event]) -> list[Piece]:
        pieces: list[Piece] = []
        for event in events:
            if isinstance(event, Name):
                self._num_calls += 1
                self._is_after_call = True
                pieces.append(self._begun(event.name))
            elif isinstance(event, Arguments):
                function = CalledFunction(arguments=event.text)
                pieces.append(CalledTool(index=self._num_calls - 1, function=function))
            else:
                self._within += event
        return pieces

    def _begun(self, name: str) -> CalledTool:
        return CalledTool(
            index=self._num_calls - 1,
            id=f"call_{uuid.uuid4().hex}",
            type="function",
            function=CalledFunction(name=name, arguments=""),
        )

    def _text(self, text: str) -> list[Piece]:
        if self._is_after_call:
            text = text.lstrip("\n")
            self._is_after_call = not text
        return [text] if text else []


class TaggedCallParser(ToolCallParser):
    """Parser of calls in tags.

    A possible beginning of a tag is held back, with the newlines before the tag.
    """

    def __init__(
        self, reader: Callable[[], CallReader], openings: tuple[str, ...], is_forced: bool
    ) -> None:
        """Start an answer.

        openings: tags before a call; the reader gets each tag except `<tool_call>`.
        """
        super().__init__(reader, is_forced)
        self._openings = openings

    def _take_text(self) -> str:
        held = self._held
        found = [(at, tag) for tag in self._openings if (at := held.find(tag)) >= 0]
        if not found:
            start = min(tag_start(held, tag) for tag in self._openings)
            self._held = held[start:]
            return held[:start]
        at, tag = min(found)
        text = held[:at].rstrip("\n")
        end = at + len(tag) if tag == OPENING else at
        self._begin_call(held[len(text) : end], held[end:])
        return text

    def _refused(self) -> list[Piece]:
        length = 0 if self._opening.endswith(OPENING) else 1  # of a held tag only `<` is text
        text, self._held = self._opening + self._held[:length], self._held[length:]
        return self._text(text)


class BareCallParser(ToolCallParser):
    """Parser of an answer that is a JSON call without tags, several calls, or an array of calls."""

    def __init__(self, is_forced: bool) -> None:
        super().__init__(partial(JsonReader, in_tags=False), is_forced)
        self._may_be_call = True
        self._is_array = False

    def _take_text(self) -> str:
        held = self._held
        found = (_BETWEEN if self._num_calls else _BEFORE).match(held)
        start = found.end() if found else 0
        if self._may_be_call and (start == len(held) or held[start] == "{"):
            if start < len(held):
                self._is_array = self._is_array or "[" in held[:start]
                self._begin_call(held[:start], held[start:])
            return ""
        self._held = ""
        if self._may_be_call and self._is_array and held[start] == "]":
            held = held[start + 1 :]
        self._may_be_call = False
        return held

    def _refused(self) -> list[Piece]:
        self._may_be_call = False
        text, self._held = self._opening + self._held, ""
        return self._text(text)


def make_parser(form: FormatName, schemas: Schemas, is_forced: bool = False) -> ToolCallParser:
    """Return the parser of a format."""
    if form == "json":
        return BareCallParser(is_forced)
    if form == "qwen3_coder":
        reader = partial(XmlReader, schemas, is_forced)
        return TaggedCallParser(reader, (OPENING, FUNCTION), is_forced)
    return TaggedCallParser(partial(JsonReader, in_tags=True), (OPENING,), is_forced)
