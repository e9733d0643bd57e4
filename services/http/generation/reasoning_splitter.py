"""Reasoning and content of generated text, piece by piece."""

from penstock.protocol.tokenizer_file import END_THINK
from penstock.services.http.generation.tool_call_parser import Piece, ToolCallParser


class ReasoningSplitter:
    """Splits one answer of Qwen3: `<think>\\n…\\n</think>\\n\\nanswer`.

    The detokenizer has found the tokens of the tags. Newlines next to the tags belong to
    neither part. Newlines at the end of reasoning are held back, and white space before all text.
    """

    def __init__(self) -> None:
        self._held = ""
        self._position = 0  # of the held text in the request's text
        self._end: int | None = None
        self._is_reasoning = self._skips_newlines = False
        self.is_answer = False  # True if all further text is the answer's

    def feed(self, text: str, begin: int | None, end: int | None) -> tuple[str, str]:
        """Return the reasoning and the answer that `text` adds; each may be empty.

        begin, end: `reasoning_begin` and `reasoning_end` of the message with the text.
        """
        self._held += text
        self._end = end
        if not (self._is_reasoning or self.is_answer):
            self._start(begin)
        if self._is_reasoning:
            return self._split(is_last=False)
        return "", self._take(len(self._held)) if self.is_answer else ""

    def finish(self) -> tuple[str, str]:
        """Return what was held back, without newlines at the end of reasoning."""
        if self._is_reasoning:
            return self._split(is_last=True)
        self.is_answer = True
        return "", self._take(len(self._held))

    def _start(self, begin: int | None) -> None:
        if begin is None:
            self.is_answer = bool(self._held.strip())
        elif begin <= len(self._held):
            self._take(begin)
            self._is_reasoning = self._skips_newlines = True

    def _split(self, is_last: bool) -> tuple[str, str]:
        length = len(self._held) if self._end is None else self._end - self._position
        inside, after = self._held[:length], self._held[length:]
        has_ended = self._end is not None and length <= len(self._held)
        reasoning = self._take(len(inside.rstrip("\n")))
        if not has_ended or (not is_last and after != END_THINK and END_THINK.startswith(after)):
            return reasoning, ""
        self._held, self._skips_newlines = after.removeprefix(END_THINK), True
        self._is_reasoning, self.is_answer = False, True
        return reasoning, self._take(len(self._held))

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        self._position += length
        if self._skips_newlines:
            taken = taken.lstrip("\n")
            self._skips_newlines = not taken
        return taken


class ReasoningCalls:
    """Holder of tool calls before `</think>`: only what follows shows what they are.

    Calls before a later `</think>` are part of the reasoning. Where none follows, the first call
    has ended the reasoning: it and others are calls, and the text after it is the answer.
    """

    def __init__(self, parser: ToolCallParser) -> None:
        self._parser = parser
        self._held = ""
        self._pieces: list[Piece] = []  # of the held text, from its first call on

    def feed(self, reasoning: str) -> str:
        """Return new and held reasoning up to what may be a call."""
        self._held += reasoning
        return self._release(self._parser.feed(reasoning))

    def give_back(self) -> str:
        """Return what was held back, before `</think>`."""
        return self._held

    def finish(self, is_cut: bool) -> tuple[str, list[Piece]]:
        """Return the end of the reasoning, and what comes after it; is_cut: as in the parser."""
        return self._release(self._parser.finish(is_cut)), self._pieces

    def _release(self, pieces: list[Piece]) -> str:
        """Keep the pieces from the first call on. Return the text before it."""
        text = ""
        for piece in pieces:
            if isinstance(piece, str) and not self._pieces:
                text += piece
            else:
                self._pieces.append(piece)
        self._held = self._held[len(text) :]
        return text
