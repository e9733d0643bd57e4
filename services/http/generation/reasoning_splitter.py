"""Reasoning and content of generated text, piece by piece."""

from penstock.services.http.generation.tool_call_reader import tag_start

_THINK, _END_THINK = "<think>", "</think>"


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
                return self._take(tag_start(inside, _END_THINK)), ""
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
