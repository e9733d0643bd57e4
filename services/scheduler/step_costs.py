"""The seconds of steps by what they compute, learned from measurements. No I/O, no clock.

A step takes as long as one that only decodes as many sequences, and as long as its chunks of
prompts. Chunks cost a constant, and so much for each token, for each key that a token attends to,
and for each row of logits, which prompt logprobs need. These costs are learned by normalised least
mean squares (Nagumo and Noda 1967, doi:10.1109/TAC.1967.1098599), and never fall below 0. CUDA
graphs pad the tokens of a step to one of a few sizes; then padding costs as much as other tokens,
and a chunk fills the largest size that the step has time for. Attention pads a chunk to whole
tiles of tokens, so it also costs the keys of its padding.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

# constant, tokens, keys and rows of logits of a usual step: costs of these are learned equally fast
SCALES = 1.0, 256.0, 256.0 * 4096, 64.0
RISE, FALL = 1 / 2, 1 / 8  # weight of a step that is slower or faster than expected
MAX_RATIO = 4  # to the expected seconds: a step that was late, as of a paused machine, counts less
FIRST_TOKENS = 64  # of the first chunks; later ones have up to twice the tokens of any before
# that a step may always have, even if it takes longer than it should; a tile if that is more
LEAST_TOKENS = 16
# Without a target, a step may take TIMES times the seconds that decoding alone takes: with shorter
# chunks more than 1/32 of the machine's time would be lost. Over MAX_SECONDS, MIN_TIMES are enough.
TIMES, MAX_SECONDS, MIN_TIMES = 32, 1.0, 8
MAX_STEP = 1e5  # seconds of a step that is believed
MANY = 1 << 30  # tokens: no limit
SHARE = 0.9  # of the target that a step is expected to take; the rest is for what varies


@dataclass(slots=True)
class StepShape:
    """Amounts of work in a step."""

    num_decoding: int = 0  # sequences, without their drafts
    # of the chunks of prompts
    num_tokens: int = 0
    num_keys: int = 0  # sum over the tokens of the keys that each attends to
    num_logits: int = 0  # rows of logits for prompt logprobs
    limit: float = math.inf  # seconds that the step should take at most
    tiles: Sequence[int] = ()  # `StepCosts.tiles`

    def add_chunk(self, begin: int, end: int, has_logits: bool) -> None:
        """Add the tokens of a prompt at the positions [begin, end)."""
        self.num_tokens += end - begin
        tile = _tile(end - begin, self.tiles)
        number = -(-(end - begin) // tile) * tile
        self.num_keys += number * (2 * begin + number) // 2
        self.num_logits += (end - begin) * has_logits


class StepCosts:
    """The costs of steps, and the tokens of prompts that a step has time for."""

    def __init__(self, target: float = 0.0, least_tokens: int = 1) -> None:
        """Learn costs. Until `is_timed`, a step may have any number of tokens.

        target: seconds of a step beside streams; 0: no target. least_tokens: of a chunk.
        """
        self._target = target * SHARE
        # tokens to which workers pad steps with chunks, ascending; longer steps are not padded
        self.sizes: list[int] = []
        # tokens of the tiles to which attention pads a chunk, ascending: of the largest tile that
        # a chunk fills, else of the smallest
        self.tiles: Sequence[int] = ()
        self.least_tokens = max(least_tokens, LEAST_TOKENS)
        # binary size of the batch → mean seconds of steps that only decode
        self._decoding: dict[int, float] = {}
        self._costs = [0.0] * len(SCALES)  # seconds for the amounts in SCALES
        self.is_timed = False  # True: steps are measured, or will be
        self._known: set[bool] = set()  # whether steps with chunks had rows of logits
        self.forget_sizes()

    def forget_sizes(self) -> None:
        """Begin with short chunks again, as after a worker failure."""
        # tokens and rows of logits that a step may have
        self._most_tokens = self._most_logits = max(FIRST_TOKENS, self.least_tokens)

    def begin(self, shape: StepShape, num_decoding: int, num_streams: int) -> None:
        """Begin a step without chunks. num_streams: sequences that wait for their next token."""
        shape.num_decoding, shape.tiles = num_decoding, self.tiles
        decoding = self._decode_seconds(num_decoding)  # 0: not known; a short step will show it
        longest = TIMES * decoding if num_decoding else math.inf
        shape.limit = max(min(longest, MAX_SECONDS), MIN_TIMES * decoding)
        if self._target and num_streams:
            shape.limit = self._target

    def most_tokens(self, shape: StepShape, begin: int, has_logits: bool) -> int:
        """Return how many tokens at `begin` of a prompt a step still has time for."""
        if not self.is_timed:
            return MANY
        most = min(self._fitting(shape, begin, has_logits), self._most_tokens - shape.num_tokens)
        if has_logits:
            most = min(most, self._most_logits - shape.num_logits)
        return max(most, self._least - shape.num_tokens, 0)

    @property
    def _least(self) -> int:
        """Tokens that a step may always have. On a GPU fewer take as long as a tile."""
        return max(self.least_tokens, *self.tiles[:1], 1)

    def _fitting(self, shape: StepShape, begin: int, has_logits: bool) -> int:
        """Return the largest n for which the costs of n tokens are at most the seconds left."""
        _, token, key, logits = (
            cost / scale for cost, scale in zip(self._costs, SCALES, strict=True)
        )
        each = key * begin + logits * has_logits
        before = shape.num_decoding + shape.num_tokens
        left = shape.limit - self.seconds(shape) + token * self._padded(shape)
        number = partial(_number, tiles=self.tiles)
        numbers = [
            min(size - before, number(each, key, left - token * (size - shape.num_decoding)))
            for size in self.sizes[bisect_left(self.sizes, before) :]
        ]
        unpadded = number(token + each, key, left - token * shape.num_tokens)
        if not self.sizes or before + unpadded > self.sizes[-1]:
            numbers.append(unpadded)
        return max(numbers, default=0)

    def _padded(self, shape: StepShape) -> int:
        """Return the tokens of chunks, and of padding."""
        number = shape.num_decoding + shape.num_tokens
        at = bisect_left(self.sizes, number) if shape.num_tokens else len(self.sizes)
        return self.sizes[at] - shape.num_decoding if at < len(self.sizes) else shape.num_tokens

    def seconds(self, shape: StepShape, most: float = math.inf) -> float:
        """Return the expected seconds of a step; with chunks, even if it has none yet.

        most: seconds that decoding alone may take.
        """
        most = min(most, self._decode_seconds(shape.num_decoding))
        return most + sum(a * b for a, b in zip(self._costs, self._amounts(shape), strict=True))

    def measure(self, shape: StepShape, seconds: float) -> None:
        """Learn from a step; seconds: 0 if they were not measured."""
        if not 0 < seconds < MAX_STEP:  # NaN, too
            return
        self.is_timed = True
        size = shape.num_decoding.bit_length()  # 0: a plan that only brings copies, or only chunks
        # a step with chunks takes no less than one without: the mean is that of a slower time
        is_first = not self._decoding and shape.num_tokens <= self._least
        known = self._decode_seconds(shape.num_decoding)
        if size and (not shape.num_tokens or is_first or seconds < known):
            before = self._decoding.get(size, seconds)
            self._decoding[size] = before + FALL * (min(seconds, MAX_RATIO * before) - before)
        if shape.num_tokens:
            self._measure_chunks(shape, seconds)

    def _measure_chunks(self, shape: StepShape, seconds: float) -> None:
        self._most_tokens = max(self._most_tokens, 2 * shape.num_tokens)
        self._most_logits = max(self._most_logits, 2 * shape.num_logits)
        amounts, expected = self._amounts(shape), self.seconds(shape, seconds)
        has_logits = shape.num_logits > 0
        if has_logits:  # other costs are better learned from other steps
            amounts = (*[0.0] * (len(SCALES) - 1), amounts[-1])
        is_known = has_logits in self._known
        self._known.add(has_logits)
        error = min(seconds, MAX_RATIO * expected if is_known else seconds) - expected
        weight = (RISE if error > 0 else FALL) if is_known else 1.0
        step = weight * error / sum(part * part for part in amounts)
        self._costs = [
            max(0.0, cost + step * part) for cost, part in zip(self._costs, amounts, strict=True)
        ]

    def _decode_seconds(self, num_decoding: int) -> float:
        """Return the seconds of a step of the most similar known size; 0 if none is known."""
        known, size = self._decoding, num_decoding.bit_length()
        if not (known and size):
            return 0.0
        return known.get(size) or known[min(known, key=lambda other: abs(other - size))]

    def _amounts(self, shape: StepShape) -> tuple[float, ...]:
        """Return the parts of the chunks' costs as multiples of SCALES."""
        numbers = 1, self._padded(shape), shape.num_keys, shape.num_logits
        return tuple(number / scale for number, scale in zip(numbers, SCALES, strict=True))


def _tile(number: int, tiles: Sequence[int]) -> int:
    """Return the tokens of the tiles of a chunk of this number of tokens; one is not padded."""
    return tiles[max(bisect_right(tiles, number) - 1, 0)] if tiles and number > 1 else 1


def _number(each: float, key: float, left: float, tiles: Sequence[int] = ()) -> int:
    """Return the largest n for which each n + key n² / 2 is at most `left`, 0 or more.

    With `tiles`, the largest that fills its tiles.
    """
    if left <= 0:
        return 0
    root = math.sqrt(each * each + 2 * key * left)
    # the root of the equation in a form without cancellation
    number = int(min(2 * left / (each + root), MANY)) if root else MANY
    return number - number % _tile(number, tiles)
