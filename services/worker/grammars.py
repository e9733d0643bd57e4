"""Bitmasks of the tokens that grammars allow (structured output)."""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par

from penstock.protocol.checkpoint import ModelError
from penstock.protocol.messages.structured import GRAMMAR_LIMITS, Reasoning, StructuredOutputs
from penstock.services.worker.processed_row import Bitmask, TokenBits

TAGS = ("<think>", "</think>")
"""tags around reasoning"""


class _State:
    """Progress of a row's output in its grammar."""

    def __init__(self, matcher: LLMatcher, reasoning: Reasoning, tags: tuple[int, int]) -> None:
        """Keep a compiled grammar; tags: as `Grammars._tags`."""
        self.matcher = matcher
        self.reasoning = reasoning if min(tags) >= 0 else "none"
        """"open": the grammar begins after `</think>`; "optional": the next token may be `<think>`,
        see `opening_tag`"""
        self._tags = tags

    def accept(self, token_id: int) -> None:
        """Advance by the row's new token; the next mask fails if the grammar refused the token."""
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
    """Matchers of the rows with a grammar, by slot; on rank 0 only.

    llguidance matches bytes, so that special tokens match only their names in a Lark grammar. The
    row's end tokens are allowed exactly where the grammar may end. A JSON schema keyword that
    llguidance does not enforce is an error: `uniqueItems`, `not`, `if`, `contains`,
    `propertyNames`, `dependentRequired`, `dependentSchemas`, `unevaluatedProperties`, unknown
    formats, `oneOf` of schemas that may overlap, and in some places `minProperties` and
    `patternProperties`. Unknown keywords have no effect, as in JSON Schema. One deviation from a
    schema: keys that only `additionalProperties` or `patternProperties` describe may occur twice.

    If an answer begins with reasoning, the grammar applies after `</think>`. Reasoning may contain
    all tokens except the row's end tokens, so that every ended text matches its grammar.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """Start to load the tokenizer in the compiler's thread; see `wait`."""
        self._path = folder / "tokenizer.json"
        self._num_words = (vocab_size + 31) // 32
        self._rows: dict[int, _Row] = {}
        self._compiler = ThreadPoolExecutor(1, "grammars")
        self._executor = LLExecutor()
        self._tokenizer = self._compiler.submit(LLTokenizer, str(self._path))

    def wait(self) -> None:
        """Wait for the tokenizer. Raises ModelError.

        A large vocabulary takes over a second, in which no other thread runs. Call this before
        requests are served.
        """
        try:
            self._tokenizer.result()
        except Exception as error:  # llguidance raises nothing more exact
            raise ModelError(f"{self._path}: llguidance could not read it: {error}") from error

    def add(
        self,
        slot: int,
        spec: StructuredOutputs,
        output_token_ids: list[int],
        end_token_ids: list[int],
        reasoning: Reasoning = "none",
    ) -> None:
        """Start to compile the grammar of a row with these output tokens so far."""
        compiled = self._compiler.submit(self._compile, spec, output_token_ids, reasoning)
        known = [token_id for token_id in end_token_ids if token_id < 32 * self._num_words]
        self._rows[slot] = _Row(compiled, known)

    def remove(self, slot: int) -> None:
        if row := self._rows.pop(slot, None):
            row.compiled.cancel()

    def clear(self) -> None:
        for slot in list(self._rows):
            self.remove(slot)

    def accept(self, slot: int, token_id: int) -> None:
        """Advance a row with a grammar by its new token; -1: the row failed."""
        row = self._rows[slot]
        if row.failure or token_id < 0:
            return
        if token_id in row.end_token_ids:
            row.ended = True
        elif not row.ended:
            row.state.accept(token_id)

    def opening_tag(self, slot: int) -> int:
        """Return the token with which the row may start to reason now, or -2.

        The mask excludes this token; it may be drawn only if the model draws it from all tokens.
        Otherwise a grammar that forbids the model's choice would make the tag likely.
        """
        state = self._rows[slot].state
        return self._tags[0] if state.reasoning == "optional" else -2

    def bitmask(self, slots: list[int]) -> tuple[Bitmask, dict[int, str]]:
        """Return the allowed tokens of each of `slots`, and the reasons of failed rows.

        Waits for grammars that are being compiled. The mask of a failed row allows all tokens.
        """
        masks = np.zeros((len(slots), self._num_words), np.int32)
        rows = [self._rows[slot] for slot in slots]
        self._fill(masks, rows)
        alive = np.asarray(masks.any(axis=1)).tolist()
        for mask, row, is_alive in zip(masks, rows, alive, strict=True):
            if not row.failure and not is_alive:
                row.failure = (
                    "structured_outputs: the grammar allows no next token; if the text is "
                    "complete, do not forbid EOS (ignore_eos, min_tokens, allowed_token_ids)"
                )
            if row.failure:
                mask.fill(-1)
        return masks, {
            slot: row.failure for slot, row in zip(slots, rows, strict=True) if row.failure
        }

    def _fill(self, masks: Bitmask, rows: list[_Row]) -> None:
        tokenizer = self._tokenizer.result()
        thinking = [row.state.reasoning == "open" for row in rows]
        open_matchers = [
            (row.state.matcher, index)
            for index, row in enumerate(rows)
            if not thinking[index] and _is_open(row)
        ]
        if open_matchers:
            # as wide as the tokenizer's vocabulary, which may be smaller than the model's
            width = (tokenizer.vocab_size + 31) // 32
            texts = masks if width == self._num_words else np.zeros((len(rows), width), np.int32)
            fill_next_token_bitmask_par(self._executor, open_matchers, texts)
            masks[:, :width] = texts
        masks[thinking] = -1
        TokenBits(tokenizer.eos_tokens).forbid(masks)
        may_end = [not is_thinking for is_thinking in thinking]
        for matcher, index in open_matchers:
            may_end[index] = matcher.is_accepting()
        for index, row in enumerate(rows):
            change = row.end_words.allow if may_end[index] else row.end_words.forbid
            change(masks[index])
        for matcher, index in open_matchers:
            rows[index].failure = _failure(matcher)

    @cached_property
    def _tags(self) -> tuple[int, int]:
        """Token ids of `<think>` and `</think>`; -1: not in the vocabulary."""
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
            state.accept(token_id)
        return state


def _is_open(row: _Row) -> bool:
    """Return True if the row's text has not ended; waits for its matcher."""
    if not row.ended and not row.failure:
        row.failure = _failure(row.state.matcher)
        row.ended = row.state.matcher.is_stopped()
    return not row.ended and not row.failure


def _failure(matcher: LLMatcher) -> str:
    """Return the reason of a failure, or an empty string."""
    if not matcher.is_error():
        return ""
    reason = matcher.get_error().removesuffix("<non-verbose/>").strip()
    return f"structured_outputs: the grammar failed: {reason}"
