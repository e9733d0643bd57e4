"""The n-gram proposer, which finds draft tokens in the sequence itself.

A *pointer* marks an earlier place in the sequence whose last tokens equal the sequence's end. The
tokens after the pointer are the guess (prompt lookup, Saxena 2023,
https://github.com/apoorvumang/prompt-lookup-decoding). After the last known token, the guess
repeats the guessed tokens, so that a loop is guessed to any length.

Guesses are optimistic: while guesses are in flight, the next guesses assume that all of them are
right. The first wrong guess voids all later guesses in flight, and the sequence continues from its
last known token. So a wrong guess costs as many steps as are in flight, and only a long match is
used. The required length doubles after a wrong guess and falls by 1 after a right guess.
"""

from collections import deque

LONG, SHORT = 8, 3  # lengths of the n-grams in the index
MAX_REQUIRED = 32
KNOWN = -1  # an input token that is not a guess: known now, or known once it is sampled


class NgramLookup:
    """The n-gram index of one sequence since its admission, and its guesses in flight."""

    def __init__(self) -> None:
        # True if the worker has no next input token, or a wrong one: the next draft must name it
        self.is_paused = False
        # number of tokens before the pointer that equal the sequence's last tokens; 0: no pointer
        self.matched = 0
        self._required = SHORT  # minimum of `matched` for a guess
        self._pointer = 0
        self._index: dict[int, int] = {}  # hash of an n-gram → its last end
        self._num_indexed = SHORT
        # input tokens of the rows in flight, guesses or KNOWN; first the row of the prefill
        self._inputs = deque([KNOWN])
        self._num_void = 0  # void rows in flight before these, which follow a wrong guess

    def accept_row(self) -> bool:
        """Remove the oldest row in flight. Return whether its token is valid, not void."""
        if self._num_void:
            self._num_void -= 1
            return False
        self._inputs.popleft()
        return True

    def check(self, token_ids: list[int]) -> bool | None:
        """Return whether the guess of a new token is right; None if the token was not guessed."""
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
        self._required = min(2 * self._required, MAX_REQUIRED)
        self._num_void = len(self._inputs)
        self._inputs.clear()
        self.is_paused = True
        return False

    def look_up(self, token_ids: list[int]) -> bool:
        """Index new tokens and set the pointer. Return whether the match has the required length.

        The pointer may move, so no guess may be in flight.
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
        """Return guesses for the positions [begin, end), which come after the known tokens."""
        known, start = len(token_ids), self._pointer
        return [token_ids[start + (at - known) % (known - start)] for at in range(begin, end)]

    def send(self, inputs: list[int]) -> None:
        """Record planned rows by their input tokens, guesses or KNOWN."""
        self._inputs.extend(inputs)
        self.is_paused = len(inputs) > 1


def _num_equal(token_ids: list[int], end: int) -> int:
    """Return how many tokens before `end` equal the last tokens, at most MAX_REQUIRED."""
    limit = min(end, MAX_REQUIRED)
    pairs = zip(reversed(token_ids[end - limit : end]), reversed(token_ids), strict=False)
    return next((number for number, (left, right) in enumerate(pairs) if left != right), limit)
