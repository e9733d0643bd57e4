"""N-gram lookup, the proposer of drafts: it guesses the next tokens by earlier equal ones.

A *pointer* follows an earlier place of the sequence that equals its end; the tokens after it are
the guess (prompt lookup, Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding). After
the last known token it continues with the guesses themselves, so that a loop is guessed to any
length.

Guesses are optimistic: while some are in flight, the next ones follow them as if all were right.
The first wrong one voids the later ones in flight, and the sequence continues from its last known
token. So a wrong guess costs as many steps as are in flight, and only a long match is trusted: its
required length doubles after a wrong guess and falls by one after each right one.
"""

from collections import deque

LONG, SHORT = 8, 3  # lengths of the token sequences in the index
MAX_REQUIRED = 32
KNOWN = -1  # in place of a token: not a guess, for the sequence has it, or will when it is computed


class NgramLookup:
    """The guesses for one sequence since its admission, and those in flight."""

    def __init__(self) -> None:
        # the worker lacks its next token, or has a wrong one: a draft must name it
        self.is_paused = False
        # tokens before the pointer that equal the last ones of the sequence; 0: no pointer
        self.matched = 0
        self._required = SHORT  # of `matched`, to guess
        self._pointer = 0
        self._index: dict[int, int] = {}  # hash of LONG or SHORT tokens → where they ended last
        self._num_indexed = SHORT
        # of the rows in flight: guesses or KNOWN; the first one is of the prefill
        self._inputs = deque([KNOWN])
        self._num_void = 0  # rows in flight before these, that follow from a wrong guess

    def accept_row(self) -> bool:
        """Return whether the token of the oldest row in flight is the sequence's next one."""
        if self._num_void:
            self._num_void -= 1
            return False
        self._inputs.popleft()
        return True

    def check(self, token_ids: list[int]) -> bool | None:
        """Return whether the guess in flight of a new token is right; None if there is none."""
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
        """Return whether an earlier place equals the end over the required length.

        To be called when no guess is in flight: the pointer may move.
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
        """Return tokens for the positions [begin, end), which follow the known ones."""
        known, start = len(token_ids), self._pointer
        return [token_ids[start + (at - known) % (known - start)] for at in range(begin, end)]

    def send(self, inputs: list[int]) -> None:
        """Note planned rows with these input tokens, guesses or KNOWN."""
        self._inputs.extend(inputs)
        self.is_paused = len(inputs) > 1


def _num_equal(token_ids: list[int], end: int) -> int:
    """Return the number of tokens before `end` that equal the last ones, up to a limit."""
    limit = min(end, MAX_REQUIRED)
    pairs = zip(reversed(token_ids[end - limit : end]), reversed(token_ids), strict=False)
    return next((number for number, (left, right) in enumerate(pairs) if left != right), limit)
