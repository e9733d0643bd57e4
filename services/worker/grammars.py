"""What rows may say next where a grammar restricts them: a bitmask of the vocabulary per row."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par
from numpy.typing import NDArray

from penstock.protocol.structured import GRAMMAR_LIMITS, StructuredOutputs

Bitmask = NDArray[np.int32]
"""int32 [rows, ceil(vocab_size / 32)]: bit i of word w is token 32 w + i"""


class _Row:
    def __init__(self, compiled: "Future[LLMatcher]", end_tokens: Bitmask) -> None:
        self.compiled = compiled
        self.end_tokens = end_tokens
        """int32 [words]"""
        self.ended = False
        self.failure = ""


class Grammars:
    """The matchers of the rows that have a grammar, by slot. On rank 0 only.

    Grammars are llguidance's: it matches bytes, so that special tokens match nothing but their
    names in a Lark grammar. A text may end exactly where its grammar may: there the row's end
    tokens are allowed, and nowhere else. Every JSON schema keyword that llguidance does not enforce
    is an error: `uniqueItems`, `not`, `if`, `contains`, `propertyNames`, `dependentRequired`,
    `dependentSchemas`, `unevaluatedProperties`, formats that it does not know, `oneOf` of schemas
    that may overlap, `minProperties` and `patternProperties` in some places. What is no keyword of
    the schema's draft means nothing, as in JSON Schema. It departs from a schema in one point:
    keys that only `additionalProperties` or `patternProperties` describe may come twice.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._path = str(folder / "tokenizer.json")
        self._num_words = (vocab_size + 31) // 32
        self._rows: dict[int, _Row] = {}
        self._compiler = ThreadPoolExecutor(1, "grammars")
        self._executor = LLExecutor()
        self._tokenizer: LLTokenizer | None = None
        """loaded with the first grammar, in the compiler's thread: a large one takes a second"""

    def add(
        self,
        slot: int,
        spec: StructuredOutputs,
        output_token_ids: list[int],
        end_token_ids: list[int],
    ) -> None:
        """Begins to compile the grammar of a row, which has said `output_token_ids` already."""
        compiled = self._compiler.submit(self._compile, spec, output_token_ids)
        self._rows[slot] = _Row(compiled, self._bits(end_token_ids))

    def remove(self, slot: int) -> None:
        """The row has left; it need not have a grammar."""
        if row := self._rows.pop(slot, None):
            row.compiled.cancel()

    def clear(self) -> None:
        """All rows have left."""
        for slot in list(self._rows):
            self.remove(slot)

    def accept(self, slot: int, token_id: int) -> None:
        """The token drawn for the row, which has a grammar."""
        row = self._rows[slot]
        if row.failure:
            return
        if _has(row.end_tokens, token_id):
            row.ended = True
        elif not row.ended:
            row.compiled.result().consume_token(token_id)  # the next mask tells if it was refused

    def bitmask(self, slots: list[int]) -> tuple[Bitmask, dict[int, str]]:
        """The tokens that each of `slots` may draw next, and why rows can't go on.

        Waits for grammars that are being compiled. The mask of a failed row allows all tokens.
        """
        masks = np.zeros((len(slots), self._num_words), np.int32)
        rows = [self._rows[slot] for slot in slots]
        self._fill(masks, rows)
        for mask, row in zip(masks, rows, strict=True):
            if not row.failure and not mask.any():
                row.failure = "no token may follow: the grammar has come to a dead end"
            if row.failure:
                mask.fill(-1)
        return masks, {
            slot: row.failure for slot, row in zip(slots, rows, strict=True) if row.failure
        }

    def _fill(self, masks: Bitmask, rows: list[_Row]) -> None:
        going = [(matcher, index) for index, row in enumerate(rows) if (matcher := _going(row))]
        if going and self._tokenizer:
            # as wide as the tokenizer's vocabulary, which may be smaller than the model's
            width = (self._tokenizer.vocab_size + 31) // 32
            texts = np.zeros((len(rows), width), np.int32)
            fill_next_token_bitmask_par(self._executor, going, texts)
            masks[:, :width] = texts & ~self._bits(self._tokenizer.eos_tokens)[:width]
        may_end = {index: matcher.is_accepting() for matcher, index in going}
        for index, row in enumerate(rows):
            masks[index] &= ~row.end_tokens
            if may_end.get(index, True):
                masks[index] |= row.end_tokens
        for matcher, index in going:
            rows[index].failure = _failure(matcher)

    def _compile(self, spec: StructuredOutputs, output_token_ids: list[int]) -> LLMatcher:
        if self._tokenizer is None:
            self._tokenizer = LLTokenizer(self._path)
        limits = LLParserLimits(**GRAMMAR_LIMITS)
        matcher = LLMatcher(self._tokenizer, spec.to_llguidance(), log_level=0, limits=limits)
        matcher.consume_tokens(output_token_ids)
        return matcher

    def _bits(self, token_ids: list[int]) -> Bitmask:
        bits = np.zeros(self._num_words * 32, np.uint8)
        bits[[token_id for token_id in token_ids if token_id < len(bits)]] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


def _has(words: Bitmask, token_id: int) -> bool:
    return bool(words[token_id // 32] >> (token_id % 32) & 1)


def _going(row: _Row) -> LLMatcher | None:
    """The row's matcher, if its text goes on; waits for it."""
    if row.ended or row.failure:
        return None
    matcher = row.compiled.result()
    row.failure = _failure(matcher)
    row.ended = matcher.is_stopped()
    return None if row.ended else matcher


def _failure(matcher: LLMatcher) -> str:
    """Why it can't go on; empty: it can."""
    reason = matcher.get_error().removesuffix("<non-verbose/>").strip()
    return f"structured_outputs can't be followed: {reason}" if reason else ""
