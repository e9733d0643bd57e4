"""What rows may say next where a grammar restricts them: a bitmask of the vocabulary per row."""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par

from penstock.protocol.checkpoint import ModelError
from penstock.protocol.messages.structured import GRAMMAR_LIMITS, Reasoning, StructuredOutputs
from penstock.services.worker.token_masks import Bitmask, TokenBits

TAGS = ("<think>", "</think>")
"""around reasoning"""


class _State:
    """How far a row's output has come."""

    def __init__(self, matcher: LLMatcher, reasoning: Reasoning, tags: tuple[int, int]) -> None:
        """tags: as `Grammars._tags`."""
        self.matcher = matcher
        self.reasoning = reasoning if min(tags) >= 0 else "none"
        """"open": the grammar begins after `</think>`; "optional": the next token may be `<think>`,
        see `opening_tag`"""
        self._tags = tags

    def take(self, token_id: int) -> None:
        """The row has said this token; the next mask shows whether the grammar refused it."""
        begin, end = self._tags
        if self.reasoning == "open":
            self.reasoning = "none" if token_id == end else "open"
        elif (
            self.reasoning == "optional"
            and token_id == begin
            and not self.matcher.validate_tokens([begin])
        ):
            self.reasoning = "open"
        else:
            self.reasoning = "none"
            self.matcher.consume_token(token_id)


class _Row:
    def __init__(self, compiled: "Future[_State]", end_token_ids: Iterable[int]) -> None:
        self.compiled = compiled
        self.end_token_ids = frozenset(end_token_ids)
        self.end_words = TokenBits(end_token_ids)
        self.ended = False
        self.failure = ""

    @cached_property
    def state(self) -> _State:
        """Waits for it."""
        return self.compiled.result()


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

    A grammar is for what follows `</think>` where an answer begins with reasoning. In there all
    tokens are allowed but the row's end tokens: a text that has ended matches its grammar.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """Begins to load the tokenizer, in the compiler's thread; see `wait`."""
        self._path = folder / "tokenizer.json"
        self._num_words = (vocab_size + 31) // 32
        self._rows: dict[int, _Row] = {}
        self._compiler = ThreadPoolExecutor(1, "grammars")
        self._executor = LLExecutor()
        self._tokenizer = self._compiler.submit(LLTokenizer, str(self._path))

    def wait(self) -> None:
        """Wait for the tokenizer. Raises ModelError.

        Of a large vocabulary it takes over a second, in which no other thread runs: to be called
        before requests are served.
        """
        try:
            self._tokenizer.result()
        except Exception as error:  # llguidance raises nothing more exact
            raise ModelError(f"{self._path}: llguidance can't read it: {error}") from error

    def add(
        self,
        slot: int,
        spec: StructuredOutputs,
        output_token_ids: list[int],
        end_token_ids: list[int],
        reasoning: Reasoning = "none",
    ) -> None:
        """Begins to compile the grammar of a row, which has said `output_token_ids` already."""
        compiled = self._compiler.submit(self._compile, spec, output_token_ids, reasoning)
        known = [token_id for token_id in end_token_ids if token_id < 32 * self._num_words]
        self._rows[slot] = _Row(compiled, known)

    def remove(self, slot: int) -> None:
        """The row has left; it need not have a grammar."""
        if row := self._rows.pop(slot, None):
            row.compiled.cancel()

    def clear(self) -> None:
        """All rows have left."""
        for slot in list(self._rows):
            self.remove(slot)

    def accept(self, slot: int, token_id: int) -> None:
        """The token drawn for the row, which has a grammar; -1: none could be drawn."""
        row = self._rows[slot]
        if row.failure or token_id < 0:
            return
        if token_id in row.end_token_ids:
            row.ended = True
        elif not row.ended:
            row.state.take(token_id)

    def opening_tag(self, slot: int) -> int:
        """The token with which the row may begin to reason now, if the model draws it from all
        tokens; -2: there is none. The mask does not say it: where a grammar forbids what the model
        likes, the tag would be drawn for want of something better."""
        state = self._rows[slot].state
        return self._tags[0] if state.reasoning == "optional" else -2

    def bitmask(self, slots: list[int]) -> tuple[Bitmask, dict[int, str]]:
        """The tokens that each of `slots` may draw next, and why rows can't go on.

        Waits for grammars that are being compiled. The mask of a failed row allows all tokens.
        """
        masks = np.zeros((len(slots), self._num_words), np.int32)
        rows = [self._rows[slot] for slot in slots]
        self._fill(masks, rows)
        alive = np.asarray(masks.any(axis=1)).tolist()
        for mask, row, is_alive in zip(masks, rows, alive, strict=True):
            if not row.failure and not is_alive:
                row.failure = "no token may follow: the grammar has come to a dead end"
            if row.failure:
                mask.fill(-1)
        return masks, {
            slot: row.failure for slot, row in zip(slots, rows, strict=True) if row.failure
        }

    def _fill(self, masks: Bitmask, rows: list[_Row]) -> None:
        tokenizer = self._tokenizer.result()
        thinks = [row.state.reasoning == "open" for row in rows]
        going = [
            (row.state.matcher, index)
            for index, row in enumerate(rows)
            if not thinks[index] and _goes_on(row)
        ]
        if going:
            # as wide as the tokenizer's vocabulary, which may be smaller than the model's
            width = (tokenizer.vocab_size + 31) // 32
            texts = masks if width == self._num_words else np.zeros((len(rows), width), np.int32)
            fill_next_token_bitmask_par(self._executor, going, texts)
            masks[:, :width] = texts
        masks[thinks] = -1
        TokenBits(tokenizer.eos_tokens).forbid(masks)
        may_end = [not is_thinking for is_thinking in thinks]
        for matcher, index in going:
            may_end[index] = matcher.is_accepting()
        for index, row in enumerate(rows):
            change = row.end_words.allow if may_end[index] else row.end_words.forbid
            change(masks[index])
        for matcher, index in going:
            rows[index].failure = _failure(matcher)

    @cached_property
    def _tags(self) -> tuple[int, int]:
        """The tokens `<think>` and `</think>`; -1: the vocabulary has no such token."""
        tokenizer = self._tokenizer.result()
        tags = [tokenizer.tokenize_str(tag, parse_special=True) for tag in TAGS]
        begin, end = (ids[0] if len(ids) == 1 else -1 for ids in tags)
        return begin, end

    def _compile(
        self, spec: StructuredOutputs, output_token_ids: list[int], reasoning: Reasoning
    ) -> _State:
        limits = LLParserLimits(**GRAMMAR_LIMITS)
        matcher = LLMatcher(
            self._tokenizer.result(), spec.to_llguidance(), log_level=0, limits=limits
        )
        state = _State(matcher, reasoning, self._tags)
        for token_id in output_token_ids:
            state.take(token_id)
        return state


def _goes_on(row: _Row) -> bool:
    """Whether its text is not at its end; waits for its matcher."""
    if not row.ended and not row.failure:
        row.failure = _failure(row.state.matcher)
        row.ended = row.state.matcher.is_stopped()
    return not row.ended and not row.failure


def _failure(matcher: LLMatcher) -> str:
    """Why it can't go on; empty: it can."""
    if not matcher.is_error():
        return ""
    reason = matcher.get_error().removesuffix("<non-verbose/>").strip()
    return f"structured_outputs can't be followed: {reason}"
