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

from penstock.services.scheduler.proposer import Proposer

LONG, SHORT = 8, 3  # lengths of the n-grams in the index
MAX_REQUIRED = 32
UNLIMITED = 1 << 30  # a guess repeats itself after the last known token


class NgramLookup(Proposer):
    """The n-gram index of one sequence since its admission, and its guesses in flight."""

    def __init__(self, token_ids: list[int]) -> None:
        super().__init__(token_ids)
        # number of tokens before the pointer that equal the sequence's last tokens; 0: no pointer
        self.matched = 0
        self._required = SHORT  # minimum of `matched` for a guess
        self._pointer = 0
        self._index: dict[int, int] = {}  # hash of an n-gram → its last end
        self._num_indexed = SHORT

    def num_drafts(self, has_row: bool) -> int:
        may_guess = self.look_up() if has_row else self.matched
        return UNLIMITED if may_guess else 0

    def drafts(self, begin: int, end: int) -> list[int]:
        token_ids, known, start = self.token_ids, len(self.token_ids), self._pointer
        return [token_ids[start + (at - known) % (known - start)] for at in range(begin, end)]

    def _learn(self, is_right: bool | None) -> None:
        token_ids = self.token_ids
        is_matched = self.matched and token_ids[self._pointer] == token_ids[-1]
        self._pointer += 1
        self.matched = self.matched + 1 if is_matched else 0
        if is_right is not None:
            changed = self._required - 1 if is_right else 2 * self._required
            self._required = min(max(SHORT, changed), MAX_REQUIRED)

    def read(self, most: int) -> int:
        token_ids, begin = self.token_ids, self._num_indexed
        self._num_indexed = max(begin, min(begin + most, len(token_ids)))
        for end in range(begin, self._num_indexed):
            for size in (LONG, SHORT):
                self._index[hash(tuple(token_ids[end - size : end]))] = end
        return self._num_indexed - begin

    def look_up(self) -> bool:
        """Set the pointer. Return whether the match has the required length.

        The pointer may move, so no guess may be in flight. Tokens that were not read yet are not
        found.
        """
        token_ids = self.token_ids
        for size in (LONG, SHORT):
            if self.matched >= size:
                break
            if end := self._index.get(hash(tuple(token_ids[-size:])), 0):
                self._pointer, self.matched = end, _num_equal(token_ids, end)
                break
        return self.matched >= self._required


def _num_equal(token_ids: list[int], end: int) -> int:
    """Return how many tokens before `end` equal the last tokens, at most MAX_REQUIRED."""
    limit = min(end, MAX_REQUIRED)
    pairs = zip(reversed(token_ids[end - limit : end]), reversed(token_ids), strict=False)
    return next((number for number, (left, right) in enumerate(pairs) if left != right), limit)
