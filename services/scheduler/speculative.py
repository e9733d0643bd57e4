"""Guesses at the tokens to come: those that followed the same tokens before (prompt lookup).

A *pointer* goes along an earlier place of the sequence that reads as its end does; what follows
there is the guess (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding). Behind the
last known token it goes on with what was guessed itself: a loop is guessed as far as one likes.

Guesses are optimistic: while some are in flight, the next ones follow them, as if all were right.
The first that is wrong makes void what is in flight behind it, and the sequence goes on from its
last known token. So a wrong guess costs as many steps as are in flight, and only a long match is
trusted: it must be twice as long after a wrong guess, and one shorter again after each right one.
"""

from collections import deque

LONG, SHORT = 8, 3
"""tokens that the index finds"""
MOST_REQUIRED = 32
KNOWN = -1
"""in place of a token: no guess, the sequence has it, or will have it when it is computed"""


class Speculation:
    """What is guessed of one sequence since it was admitted, and what of it is in flight."""

    def __init__(self) -> None:
        self.rests = False
        """the worker does not have its next token, or not the right one: a draft must name it"""
        self.matched = 0
        """tokens before the pointer that are also the last of the sequence; 0: no pointer"""
        self._required = SHORT
        """of `matched`, to guess"""
        self._pointer = 0
        self._index: dict[int, int] = {}
        """hash of LONG or SHORT tokens → where they ended last"""
        self._num_indexed = SHORT
        self._inputs = deque([KNOWN])
        """of the rows in flight, guesses or KNOWN; the first one is the prefill's"""
        self._num_void = 0
        """rows in flight before these, that follow from a wrong guess"""

    def takes(self) -> bool:
        """Whether the token that the oldest row in flight sampled is the sequence's next one."""
        if self._num_void:
            self._num_void -= 1
            return False
        self._inputs.popleft()
        return True

    def check(self, token_ids: list[int]) -> bool | None:
        """There is a new token: whether its guess, which is in flight, is right; None: no guess."""
        token_id = token_ids[-1]
        is_matched = self.matched and token_ids[self._pointer] == token_id
        self._pointer += 1
        self.matched = self.matched + 1 if is_matched else 0
        guess = self._inputs[0] if self._inputs else KNOWN
        if guess == KNOWN:
            return None
        if guess == token_id:
            self._required = max(SHORT, self._required - 1)
            return True
        self._required = min(2 * self._required, MOST_REQUIRED)
        self._num_void = len(self._inputs)
        self._inputs.clear()
        self.rests = True
        return False

    def look_up(self, token_ids: list[int]) -> bool:
        """Whether a place is known that reads as the end does, for long enough to guess.

        To be called when no guess is in flight: the pointer may go elsewhere.
        """
        for end in range(self._num_indexed, len(token_ids)):
            for size in (LONG, SHORT):
                self._index[hash(tuple(token_ids[end - size : end]))] = end
        self._num_indexed = max(self._num_indexed, len(token_ids))
        for size in (LONG, SHORT):
            if self.matched >= size:
                break
            if end := self._index.get(hash(tuple(token_ids[-size:])), 0):
                self._pointer, self.matched = end, _num_equal(token_ids, end)
                break
        return self.matched >= self._required

    def guess(self, token_ids: list[int], begin: int, end: int) -> list[int]:
        """Tokens for the positions [begin, end), which are behind those that are known."""
        known, start = len(token_ids), self._pointer
        return [token_ids[start + (at - known) % (known - start)] for at in range(begin, end)]

    def send(self, inputs: list[int]) -> None:
        """Rows with these tokens, guesses or KNOWN, are planned."""
        self._inputs.extend(inputs)
        self.rests = len(inputs) > 1


def _num_equal(token_ids: list[int], end: int) -> int:
    """How many tokens before `end` are the last of all, as far as it matters."""
    most = min(end, MOST_REQUIRED)
    pairs = zip(reversed(token_ids[end - most : end]), reversed(token_ids), strict=False)
    return next((number for number, (one, other) in enumerate(pairs) if one != other), most)
