"""Bitmasks of the tokens that grammars allow (structured output)."""

import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import numpy as np
import psutil
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import consume_token_par, fill_next_token_bitmask, fill_next_token_bitmask_par

from penstock.protocol.checkpoint import ModelError
from penstock.protocol.messages.structured import (
    GRAMMAR_FAILED,
    GRAMMAR_LIMITS,
    Reasoning,
    StructuredOutputs,
)
from penstock.services.worker.processed_rows import Bitmask, TokenBits

# CPU time for the slow masks of a row, in addition to `SECONDS_PER_STEP`. A mask of a JSON schema
# takes 0.01 to 0.4 ms with Qwen3's vocabulary; a mask in hundreds takes 7 ms.
MAX_MASK_SECONDS = 0.1
SECONDS_PER_STEP = 0.001
# A step whose masks take longer has the next masks timed; a timed mask that takes longer counts.
SLOW_SECONDS = 0.004


class TimedMatcher:
    """The matcher of a row, with the CPU time of its slow masks."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.is_timed = False
        self.seconds = 0.0
        self.first_step = 0  # the first step with a slow mask; 0: no slow mask


class MaskFiller:
    """The threads that compute masks, with a budget of CPU time for each row.

    Within all limits of llguidance, the masks of an ambiguous grammar may take longer from token to
    token, while all other rows wait. Masks are timed individually only after a slow step; otherwise
    only the duration of all masks is measured.
    """

    def __init__(self, executor: LLExecutor) -> None:
        self._executor = executor
        self._threads = ThreadPoolExecutor(thread_name_prefix="masks")  # for timed masks
        self._num_steps = 0

    def fill(self, masks: Bitmask, rows: list[tuple[TimedMatcher, int]]) -> list[int]:
        """Write masks of rows (matcher, index). Return the indices that exceed their budget."""
        self._num_steps += 1
        timed = [row for row in rows if row[0].is_timed]
        others = [(row.matcher, index) for row, index in rows if not row.is_timed]
        if others:
            begin = perf_counter()
            fill_next_token_bitmask_par(self._executor, others, masks)
            if perf_counter() - begin > SLOW_SECONDS:
                for row, _ in rows:
                    row.is_timed = True
        return self._fill_timed(masks, timed) if timed else []

    def _fill_timed(self, masks: Bitmask, rows: list[tuple[TimedMatcher, int]]) -> list[int]:
        def fill(row: tuple[TimedMatcher, int]) -> float:
            begin = thread_time()
            fill_next_token_bitmask(row[0].matcher, masks, row[1])
            return thread_time() - begin

        exceeding = []
        for (row, index), seconds in zip(rows, self._threads.map(fill, rows), strict=True):
            row.is_timed = seconds > SLOW_SECONDS
            if not row.is_timed:
                continue
            row.seconds += seconds
            row.first_step = row.first_step or self._num_steps
            steps = self._num_steps - row.first_step
            if row.seconds > MAX_MASK_SECONDS + SECONDS_PER_STEP * steps:
                exceeding.append(index)
        return exceeding


# called with a grammar's estimated bytes, and the reason if it can't be used, or an empty string
OnCompiled = Callable[[int, str], None]
TAGS = ("<think>", "</think>")  # tags around reasoning
# niceness of the compiler thread: steps have priority
NICENESS = 5
DEAD_END = (
    "structured_outputs: the grammar allows no next token; if the text is complete, do not forbid "
    "EOS (ignore_eos, min_tokens, allowed_token_ids), or what it must contain (stop_token_ids)"
)
TOO_SLOW = (
    f"structured_outputs: got a grammar whose masks take more than {MAX_MASK_SECONDS} s of CPU "
    "time, expected less; it is ambiguous: let each text have one derivation"
)


class _State:
    """The progress of a row's output in its grammar."""

    def __init__(self, matcher: LLMatcher, reasoning: Reasoning, tags: tuple[int, int]) -> None:
        """Keep a compiled grammar, with tags as in `Grammars._tags`."""
        self.matcher = matcher
        self.timed = TimedMatcher(matcher)
        # "open": the grammar applies after `</think>`. "optional": the next token may be `<think>`,
        # see `opening_tags`.
        self.reasoning = reasoning if min(tags) >= 0 else "none"
        self._tags = tags

    def replay(self, token_ids: list[int]) -> None:
        """Consume the earlier output of a row that continues."""
        consumed = [token_id for token_id in token_ids if self.is_for_grammar(token_id)]
        if consumed:
            self.matcher.consume_tokens(consumed)

    def is_for_grammar(self, token_id: int) -> bool:
        """Return whether a new token is text for the matcher, not reasoning."""
        begin, end = self._tags
        if self.reasoning == "open":
            self.reasoning = "none" if token_id == end else "open"
            return False
        may_open = self.reasoning == "optional" and token_id == begin
        opens = may_open and not self.matcher.validate_tokens([begin])
        self.reasoning = "open" if opens else "none"
        return not opens


class _Ends:
    """The end tokens of rows, shared by rows with equal end tokens."""

    def __init__(self, token_ids: frozenset[int], tokenizer: LLTokenizer) -> None:
        self.token_ids = token_ids
        own = {token_id for token_id in token_ids if token_id < tokenizer.vocab_size}
        self.own = TokenBits(own)
        # Tokens that are forbidden where the grammar may not end. llguidance allows its own EOS
        # tokens where the grammar may end, has ended or has failed.
        self.all = TokenBits(own.union(tokenizer.eos_tokens))


class _Row:
    def __init__(self, state: _State, ends: _Ends):
        self.state = state
        self.ends = ends
        self.num_consumed = 0  # tokens that `Grammars.accept` has given to the matcher
        # set while the matcher determines the masks: not in reasoning, nor after the end
        self.matcher: TimedMatcher | None = None
        self.is_done = False  # True if the text has ended or the row has failed
        self.failure = ""

    @property
    def progress(self) -> tuple[Any, ...]:
        """State that drafts change, and the CPU time of the row's slow masks."""
        own = self.matcher, self.is_done, self.failure, self.num_consumed
        return self.state.reasoning, self.state.timed.seconds, *own

    def roll_back(self, progress: tuple[Any, ...]) -> None:
        num_consumed = self.num_consumed
        self.state.reasoning, self.state.timed.seconds, *own = progress
        self.matcher, self.is_done, self.failure, self.num_consumed = own
        if num_consumed > self.num_consumed:
            self.state.matcher.rollback(num_consumed - self.num_consumed)

    def find_matcher(self) -> TimedMatcher | None:
        """Return the matcher if it determines the next mask, else None."""
        if not self.is_done and self.state.reasoning != "open":
            self.matcher = self.state.timed
        return self.matcher

    def accept(self, token_id: int) -> bool:
        """Return whether the matcher must consume the row's new token."""
        if token_id in self.ends.token_ids:
            self.end()
        if self.is_done or self.state.reasoning == "none":
            return not self.is_done
        self.matcher = None
        return self.state.is_for_grammar(token_id)

    def end(self, failure: str = "") -> None:
        self.is_done, self.matcher, self.failure = True, None, self.failure or failure

    def may_end(self) -> bool:
        """Return whether the mask must allow the end tokens. Detect an end and a failure."""
        if not self.matcher:
            return self.is_done
        matcher = self.matcher.matcher
        if not matcher.is_stopped():
            return matcher.is_accepting()
        reason = matcher.get_error().removesuffix("<non-verbose/>").strip()
        reason = reason.replace("NoExtensionBias", "no text matches it; does it refer to itself?")
        self.end(f"{GRAMMAR_FAILED}: {reason}" if matcher.is_error() else "")
        return True


class Grammars:
    """The matchers of rows with a grammar, by slot. Only on rank 0.

    llguidance matches bytes, so special tokens match only their names in a Lark grammar. The row's
    end tokens are allowed exactly where the grammar may end. A JSON schema keyword that llguidance
    does not enforce is an error: `uniqueItems`, `not`, `if`, `contains`, `propertyNames`,
    `dependentRequired`, `dependentSchemas`, `unevaluatedProperties`, unknown formats, `oneOf` of
    schemas that may overlap, and in some places `minProperties` and `patternProperties`. Unknown
    keywords have no effect, as in JSON Schema. There is one deviation from a schema: keys that only
    `additionalProperties` or `patternProperties` describe may occur twice.

    If an answer begins with reasoning, the grammar applies after `</think>`. Reasoning may contain
    all tokens except the row's end tokens, so that every ended text matches its grammar.

    A thread compiles each grammar once, during the steps. Rows get copies of the grammar, which
    share the state of the lexer.
    """

    def __init__(self, folder: Path) -> None:
        """Start to load the tokenizer in the compiler thread; see `wait`."""
        self._path = folder / "tokenizer.json"
        self._rows: dict[int, _Row] = {}
        # compiled grammars by the scheduler's number; rows use copies
        self._compiled: dict[int, LLMatcher] = {}
        self._compiler = ThreadPoolExecutor(1, "grammars")
        self._executor = LLExecutor()
        self._filler = MaskFiller(self._executor)
        self._tokenizer = self._compiler.submit(LLTokenizer, str(self._path))
        self._compiler.submit(_be_nice)
        # slot → (matcher, its next token to consume)
        self._accepted: dict[int, tuple[LLMatcher, int]] = {}
        self._ends = lru_cache(64)(lambda ids: _Ends(ids, self._tokenizer.result()))

    def wait(self) -> None:
        """Wait for the tokenizer. Raises ModelError.

        A large vocabulary takes over a second, in which no other thread runs. So wait before
        requests are served.
        """
        try:
            self._tokenizer.result()
        except Exception as error:  # llguidance raises no narrower type
            raise ModelError(f"{self._path}: llguidance could not read it: {error}") from error

    @cached_property
    def num_words(self) -> int:
        """Width of a mask in words. Waits for the tokenizer."""
        return -(-self._tokenizer.result().vocab_size // 32)

    def compile(self, number: int, spec: StructuredOutputs, on_compiled: OnCompiled) -> None:
        """Compile a grammar in the compiler thread, which then calls `on_compiled`."""
        self._compiler.submit(self._compile_shared, self._compiled, number, spec, on_compiled)

    def forget(self, numbers: list[int]) -> None:
        """Free compiled grammars. Running rows keep their copies."""
        for number in numbers:
            self._compiled.pop(number, None)

    def add(
        self,
        slot: int,
        spec: StructuredOutputs,
        output_token_ids: list[int],
        end_token_ids: list[int],
        reasoning: Reasoning = "none",
        number: int = 0,
    ) -> None:
        """Begin a row with its output so far, and the compiled grammar `number`, if any."""
        compiled = self._compiled.get(number)
        matcher = compiled.deep_copy() if compiled else self._compile(spec)
        state = _State(matcher, reasoning, self._tags)
        state.replay(output_token_ids)
        self._rows[slot] = _Row(state, self._ends(frozenset(end_token_ids)))

    def remove(self, slot: int) -> None:
        self._accepted.pop(slot, None)
        self._rows.pop(slot, None)

    def clear(self) -> None:
        """Remove all rows and all compiled grammars, which belong to an earlier scheduler."""
        self._rows.clear()
        self._accepted.clear()
        self._compiled = {}

    def accept(self, tokens: dict[int, int]) -> None:
        """Advance rows by their new tokens.

        Matchers consume the tokens in the next `fill`, which wakes up threads anyway. If a grammar
        refuses its token, that mask fails. tokens: slot → token id, or -1 for a failed row.
        """
        for slot, token_id in tokens.items():
            row = self._rows.get(slot)
            if row and token_id >= 0 and row.accept(token_id):
                if slot in self._accepted:  # drafts were right
                    self._consume()
                self._accepted[slot] = row.state.matcher, token_id
                row.num_consumed += 1

    def _consume(self) -> None:
        if self._accepted:
            consume_token_par(self._executor, list(self._accepted.values()))
            self._accepted.clear()

    def progress(self, slots: Iterable[int]) -> dict[int, tuple[Any, ...]]:
        """Return slot → progress of rows with a grammar, for `roll_back` after drafts."""
        return {slot: self._rows[slot].progress for slot in slots if slot in self._rows}

    def roll_back(self, progress: dict[int, tuple[Any, ...]]) -> None:
        """Undo what `accept` and `fill` have changed since; all tokens are consumed."""
        for slot, before in progress.items():
            self._rows[slot].roll_back(before)

    def has(self, slot: int) -> bool:
        """Return whether the row at this slot has a grammar."""
        return slot in self._rows

    def opening_tags(self, slots: list[int]) -> dict[int, int]:
        """Return slot → `<think>` for the rows whose reasoning may start now.

        The mask excludes `<think>`, which is kept only if the model draws it from all tokens.
        Otherwise a grammar that forbids the model's choice would make the tag likely.
        """
        optional = [slot for slot in slots if self._rows[slot].state.reasoning == "optional"]
        return dict.fromkeys(optional, self._tags[0] if optional else -1)

    def fill(self, masks: Bitmask, slots: Mapping[int, int]) -> dict[int, str]:
        """Write masks of allowed tokens. Return index → reason for failed rows.

        The mask of a failed row allows all tokens.
        masks: [num_rows, num_words]. slots: index of a mask → slot. The model's tokens beyond the
        masks have no text.
        """
        matchers, with_ends = [], []
        rows = {index: self._rows[slot] for index, slot in slots.items()}
        for index, row in rows.items():
            if matcher := row.matcher or row.find_matcher():
                matchers.append((matcher, index))
            else:
                masks[index] = 0 if row.is_done else -1
                with_ends.append(index)
        self._consume()
        for index in self._filler.fill(masks, matchers):
            rows[index].end(TOO_SLOW)
            with_ends.append(index)
        for ends, some in _by_ends(rows, (index for _, index in matchers)):
            with_ends += ends.all.found(masks, some)
        return _fill_ends(masks, rows, with_ends) if with_ends else {}

    @cached_property
    def _tags(self) -> tuple[int, int]:
        """Token ids of `<think>` and `</think>`; -1 for a tag that is not in the vocabulary."""
        tokenizer = self._tokenizer.result()
        tags = [tokenizer.tokenize_str(tag, parse_special=True) for tag in TAGS]
        begin, end = (ids[0] if len(ids) == 1 else -1 for ids in tags)
        return begin, end

    def _compile(self, spec: StructuredOutputs) -> LLMatcher:
        limits, tokenizer = LLParserLimits(**GRAMMAR_LIMITS), self._tokenizer.result()
        return LLMatcher(tokenizer, spec.to_llguidance(), log_level=0, limits=limits)

    def _compile_shared(
        self,
        compiled: dict[int, LLMatcher],
        number: int,
        spec: StructuredOutputs,
        on_compiled: OnCompiled,
    ) -> None:
        """Compile a grammar into `compiled`, unless `clear` has replaced that dictionary."""
        if compiled is not self._compiled:
            return
        before = psutil.Process().memory_info().rss
        try:
            matcher = self._compile(spec)
            matcher.compute_bitmask()  # the first mask takes longest
        except Exception as error:  # noqa: BLE001  ends requests, not the worker
            on_compiled(0, repr(error))
            return
        compiled[number] = matcher
        grown = max(0, psutil.Process().memory_info().rss - before)
        on_compiled(grown, matcher.get_error() if matcher.is_error() else "")


def _fill_ends(masks: Bitmask, rows: dict[int, _Row], which: list[int]) -> dict[int, str]:
    """Allow end tokens exactly where a text may end. Return index → reason for failed rows."""
    for ends, some in _by_ends(rows, which):
        ends.all.forbid(masks, some)
        ends.own.allow(masks, [index for index in some if rows[index].may_end()])
    # most masks have an allowed token in the first words
    for place in np.flatnonzero(~masks[which, :64].any(axis=1)).tolist():
        if not masks[which[place]].any():
            rows[which[place]].end(DEAD_END)
    failed = {index: rows[index].failure for index in which if rows[index].failure}
    masks[list(failed)] = -1
    return failed


def _by_ends(rows: dict[int, _Row], which: Iterable[int]) -> Iterable[tuple[_Ends, list[int]]]:
    groups: dict[_Ends, list[int]] = {}
    for index in which:
        groups.setdefault(rows[index].ends, []).append(index)
    return groups.items()


def _be_nice() -> None:
    """Lower the priority of this thread, on Linux, where threads have their own priorities."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
