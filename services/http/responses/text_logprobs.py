"""Logprobs of the tokens that make up the text of messages, but not reasoning, calls and tags."""

import sys
from collections import deque
from collections.abc import Iterator

from penstock.protocol.messages.client import GenerateReply, TextDelta
from penstock.protocol.messages.logprobs import TokenLogprobs
from penstock.services.http.generation.logprobs import chat_logprobs
from penstock.services.http.generation.replies import ChatLogprob


class TextLogprobs:
    """Finds the tokens of a message's text, of which some characters may have been held back."""

    def __init__(self) -> None:
        self._waiting: deque[TokenLogprobs] = deque()
        """tokens that begin after the text so far"""
        self._begun: list[TokenLogprobs] = []
        """tokens whose text is not part of a message yet, and perhaps never will be"""
        self._raw = ""
        """text since the last message's piece"""
        self._position = 0
        """number of characters that came"""

    def split(self, new: TextDelta | GenerateReply) -> Iterator[str]:
        """Yield the new text token by token, so that cuts of the stream change nothing.

        White space comes with the next token: parsers hold it back, and would examine all of it
        again for each token.
        """
        self._waiting += [one for one in new.logprobs or () if one and one.text_offset is not None]
        text, first, begin = new.text, self._position, 0
        while begin < len(text):
            end, is_space = begin, True
            while end < len(text) and is_space:
                token = text[end : self._next_start(first + end) - first]
                end, is_space = end + len(token), token.isspace()
            self._position = first + end
            self._raw += text[begin:end]
            yield text[begin:end]
            begin = end
        self._next_start(self._position)

    def _next_start(self, position: int) -> int:
        """Begin the tokens up to a position. Return where the next one begins, if it is known."""
        while self._waiting and _start(self._waiting[0]) <= position:
            self._begun.append(self._waiting.popleft())
        return _start(self._waiting[0]) if self._waiting else sys.maxsize

    def take(self, content: str) -> list[ChatLogprob]:
        """Return the logprobs of a piece, which follows the last one, or reasoning and its end."""
        if not self._raw:
            return []
        found = 0 if self._raw.startswith(content) else self._raw.rfind(content)
        if found < 0:  # a text that came late, because it stood within a call
            return []
        begin = self._position - len(self._raw)
        start = begin + found
        end = start + len(content)
        ends = [*map(_start, self._begun[1:]), self._position]  # of each token
        taken = [
            one
            for one, its_end in zip(self._begun, ends, strict=False)
            if _start(one) < end and (its_end > start or _start(one) == start)
        ]
        self._begun = [one for one in self._begun if _start(one) >= end]
        self._raw = self._raw[end - begin :]
        logprobs = chat_logprobs(list(taken))
        return logprobs.content if logprobs else []

    def drop(self) -> None:
        """Forget the tokens so far, which belong to reasoning or a call."""
        self._begun.clear()
        self._raw = ""


def _start(token: TokenLogprobs) -> int:
    return token.text_offset or 0
