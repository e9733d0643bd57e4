"""Tells what a model thinks from what it answers, while the text comes."""

_OPEN, _CLOSE = "<think>", "</think>"


def tag_start(text: str, tag: str) -> int:
    """Where the newlines and the beginning of `tag` start that `text` may end with."""
    length = next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)
    return len(text[: len(text) - length].rstrip("\n"))


class ReasoningSplitter:
    """Splits one answer of Qwen3: `<think>\\n…\\n</think>\\n\\nanswer`.

    Newlines next to the tags belong to neither part. A text that does not begin with `<think>` is
    all answer; one that ends before `</think>` is all reasoning. What may be the beginning of a
    tag, or newlines before it, is held back until it is clear.

    Args:
        starts_thinking: the prompt ends within `<think>`, so that the text begins in there.
    """

    def __init__(self, starts_thinking: bool = False) -> None:
        self._starts_thinking = starts_thinking
        self._held = ""
        self._part = "start"
        self._is_behind_tag = starts_thinking
        """newlines that come now belong to nothing"""

    def feed(self, text: str) -> tuple[str, str]:
        """The reasoning and the answer that `text` adds; one of them may be empty, or both."""
        self._held += text
        reasoning = ""
        if self._part == "start":
            self._begin()
        if self._part == "reasoning":
            inside, tag, behind = self._held.partition(_CLOSE)
            if not tag:
                return self._take(tag_start(inside, _CLOSE)), ""
            reasoning = self._take(len(inside.rstrip("\n")))
            self._part, self._held, self._is_behind_tag = "answer", behind, True
        return reasoning, self._take(len(self._held)) if self._part == "answer" else ""

    def finish(self) -> tuple[str, str]:
        """What was held back; newlines at the end of reasoning stay away."""
        if self._part == "start":
            self._part = "reasoning" if self._starts_thinking else "answer"
        rest = self._take(len(self._held))
        return (rest.rstrip("\n"), "") if self._part == "reasoning" else ("", rest)

    def _begin(self) -> None:
        start = self._held.lstrip()
        if start.startswith(_OPEN):
            self._part, self._held, self._is_behind_tag = "reasoning", start[len(_OPEN) :], True
        elif not _OPEN.startswith(start):
            self._part = "reasoning" if self._starts_thinking else "answer"

    def _take(self, length: int) -> str:
        """Gives the first `length` characters of what is held."""
        taken, self._held = self._held[:length], self._held[length:]
        if self._is_behind_tag:
            taken = taken.lstrip("\n")
            self._is_behind_tag = not taken
        return taken
