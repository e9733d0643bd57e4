"""Bitmasks of the tokens that grammars allow (structured output)."""

import os
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from pathlib import Path
from time import perf_counter, thread_time

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

# of CPU time for the slow masks of a row, in addition to `SECONDS_PER_STEP`. JSON schemas take 0.01
# to 0.4 ms a mask with Qwen3's vocabulary; one mask in hundreds takes 7 ms
MAX_MASK_SECONDS = 0.1
SECONDS_PER_STEP = 0.001
SLOW_SECONDS = 0.004  # of all masks of a step, which are then timed; of one mask, which then counts


class TimedMatcher:
    """A row's matcher and the time that its slow masks took."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.is_timed = False
        self.seconds = 0.0
        self.first_step = 0  # of which a mask was slow; 0: none


class MaskFiller:
    """Threads that compute masks, within a budget of CPU time for each grammar.

    An ambiguous grammar may take more time for each mask than for the one before, within all limits
    of llguidance, while every other row waits. Only masks of steps that are slow as a whole are
    timed one by one; of other steps, only the duration is measured.
    """

    def __init__(self, executor: LLExecutor) -> None:
        self._executor = executor
        self._threads = ThreadPoolExecutor(thread_name_prefix="masks")  # of timed masks
        self._num_steps = 0

    def fill(self, masks: Bitmask, rows: list[tuple[TimedMatcher, int]]) -> list[int]:
        """Write the masks of rows, given with their slots; return slots that exceed the budget."""
        self._num_steps += 1
        timed = [row for row in rows if row[0].is_timed]
        others = [(row.matcher, slot) for row, slot in rows if not row.is_timed]
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
        for (row, slot), seconds in zip(rows, self._threads.map(fill, rows), strict=True):
            row.is_timed = seconds > SLOW_SECONDS
            if not row.is_timed:
                continue
            row.seconds += seconds
            row.first_step = row.first_step or self._num_steps
            steps = self._num_steps - row.first_step
            if row.seconds > MAX_MASK_SECONDS + SECONDS_PER_STEP * steps:
                exceeding.append(slot)
        return exceeding


# gets about how many bytes a grammar takes, and why it can't be used, or an empty string
OnCompiled = Callable[[int, str], None]
TAGS = ("<think>", "</think>")  # tags around reasoning
# of the thread that compiles: steps go first
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
    """Progress of a row's output in its grammar."""

    def __init__(self, matcher: LLMatcher, reasoning: Reasoning, tags: tuple[int, int]) -> None:
        """Keep a compiled grammar; tags: as `Grammars._tags`."""
        self.matcher = matcher
        self.timed = TimedMatcher(matcher)
        # "open": the grammar begins after `</think>`; "optional": the next token may be `<think>`,
        # see `opening_tags`
        self.reasoning = reasoning if min(tags) >= 0 else "none"
        self._tags = tags

    def replay(self, token_ids: list[int]) -> None:
        """Consume the output of a row that continues."""
        consumed = [token_id for token_id in token_ids if self.is_for_grammar(token_id)]
        if consumed:
            self.matcher.consume_tokens(consumed)

    def is_for_grammar(self, token_id: int) -> bool:
        """Return True if the matcher must consume the row's new token, not the reasoning."""
        begin, end = self._tags
        if self.reasoning == "open":
            self.reasoning = "none" if token_id == end else "open"
            return False
        may_open = self.reasoning == "optional" and token_id == begin
        opens = may_open and not self.matcher.validate_tokens([begin])
        self.reasoning = "open" if opens else "none"
        return not opens


class _Ends:
    """The end tokens of some rows."""

    def __init__(self, token_ids: frozenset[int], tokenizer: LLTokenizer) -> None:
        self.token_ids = token_ids
        own = {one for one in token_ids if one < tokenizer.vocab_size}
        self.own = TokenBits(own)
        # tokens that are forbidden where a grammar may not end; llguidance allows its own where the
        # grammar may end, has ended or has failed
        self.all = TokenBits(own.union(tokenizer.eos_tokens))


class _Row:
    def __init__(self, state: _State, ends: _Ends):
        self.state = state
        self.ends = ends
        # set while it determines the masks: not in reasoning, nor at the end
        self.matcher: TimedMatcher | None = None
        self.is_done = False  # True if the text has ended or the row has failed
        self.failure = ""

    def find_matcher(self) -> TimedMatcher | None:
        """Return the matcher if it determines the next mask."""
        if not self.is_done and self.state.reasoning != "open":
            self.matcher = self.state.timed
        return self.matcher

    def accept(self, token_id: int) -> bool:
        """Return True if the matcher must consume the row's new token."""
        if token_id in self.ends.token_ids:
            self.end()
        if self.is_done or self.state.reasoning == "none":
            return not self.is_done
        self.matcher = None
        return self.state.is_for_grammar(token_id)

    def end(self, failure: str = "") -> None:
        self.is_done, self.matcher, self.failure = True, None, self.failure or failure

    def may_end(self) -> bool:
        """Return True if the mask must allow the end tokens; detects an end and a failure."""
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

    A thread compiles each grammar once, during the steps. Its rows get copies, which share what
    the lexer has found out about the text so far.
    """

    def __init__(self, folder: Path) -> None:
        """Start to load the tokenizer in the compiler's thread; see `wait`."""
        self._path = folder / "tokenizer.json"
        self._rows: dict[int, _Row] = {}
        # by the scheduler's number; not in use themselves
        self._compiled: dict[int, LLMatcher] = {}
        self._compiler = ThreadPoolExecutor(1, "grammars")
        self._executor = LLExecutor()
        self._filler = MaskFiller(self._executor)
        self._tokenizer = self._compiler.submit(LLTokenizer, str(self._path))
        self._compiler.submit(_be_nice)
        # by slot: tokens that matchers have yet to consume
        self._accepted: dict[int, tuple[LLMatcher, int]] = {}
        self._ends = lru_cache(64)(lambda ids: _Ends(ids, self._tokenizer.result()))

    def wait(self) -> None:
        """Wait for the tokenizer. Raises ModelError.

        A large vocabulary takes over a second, in which no other thread runs. Call this before
        requests are served.
        """
        try:
            self._tokenizer.result()
        except Exception as error:  # llguidance raises nothing more exact
            raise ModelError(f"{self._path}: llguidance could not read it: {error}") from error

    @cached_property
    def num_words(self) -> int:
        """Width of masks; waits for the tokenizer."""
        return -(-self._tokenizer.result().vocab_size // 32)

    def compile(self, number: int, spec: StructuredOutputs, on_compiled: OnCompiled) -> None:
        """Compile a grammar for rows in the thread, which then calls `on_compiled`."""
        self._compiler.submit(self._compile_shared, self._compiled, number, spec, on_compiled)

    def forget(self, numbers: list[int]) -> None:
        """Free compiled grammars; rows that run keep their copies."""
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
        """Begin a row with these output tokens so far; number: of its grammar, if compiled."""
        compiled = self._compiled.get(number)
        matcher = compiled.deep_copy() if compiled else self._compile(spec)
        state = _State(matcher, reasoning, self._tags)
        state.replay(output_token_ids)
        self._rows[slot] = _Row(state, self._ends(frozenset(end_token_ids)))

    def remove(self, slot: int) -> None:
        self._accepted.pop(slot, None)
        self._rows.pop(slot, None)

    def clear(self) -> None:
        """Remove all rows, and the grammars of an earlier scheduler."""
        self._rows.clear()
        self._accepted.clear()
        self._compiled = {}

    def accept(self, tokens: dict[int, int]) -> None:
        """Advance rows by their new tokens, slot → token id; -1: the row failed.

        Matchers consume them in the next `fill`, whose threads are then awake: that mask fails if
        the grammar refuses the token.
        """
        for slot, token_id in tokens.items():
            row = self._rows.get(slot)
            if row and token_id >= 0 and row.accept(token_id):
                self._accepted[slot] = row.state.matcher, token_id

    def has(self, slot: int) -> bool:
        """Return True for a row with a grammar."""
        return slot in self._rows

    def opening_tags(self, slots: list[int]) -> dict[int, int]:
        """Return the token with which a row may start to reason now, slot → `<think>`.

        The mask excludes this token; it may be drawn only if the model draws it from all tokens.
        Otherwise a grammar that forbids the model's choice would make the tag likely.
        """
        optional = [slot for slot in slots if self._rows[slot].state.reasoning == "optional"]
        return dict.fromkeys(optional, self._tags[0] if optional else -1)

    def fill(self, masks: Bitmask, slots: list[int]) -> dict[int, str]:
        """Write the allowed tokens of `slots`; return the reasons of failed rows, by slot.

        The mask of a failed row allows all tokens.
        masks: of all slots, `num_words` wide; further tokens of the model have no text.
        """
        matchers, with_ends = [], []
        for slot in slots:
            row = self._rows[slot]
            if matcher := row.matcher or row.find_matcher():
                matchers.append((matcher, slot))
            else:
                masks[slot] = 0 if row.is_done else -1
                with_ends.append(slot)
        if self._accepted:
            consume_token_par(self._executor, list(self._accepted.values()))
            self._accepted.clear()
        for slot in self._filler.fill(masks, matchers):
            self._rows[slot].end(TOO_SLOW)
            with_ends.append(slot)
        for ends, some in self._by_ends(slot for _, slot in matchers):
            with_ends += ends.all.found(masks, some)
        return self._fill_ends(masks, with_ends) if with_ends else {}

    def _fill_ends(self, masks: Bitmask, slots: list[int]) -> dict[int, str]:
        """Allow end tokens exactly where a text may end; return as `fill`."""
        for ends, some in self._by_ends(slots):
            ends.all.forbid(masks, some)
            ends.own.allow(masks, [slot for slot in some if self._rows[slot].may_end()])
        # most masks have a token among the first
        for index in np.flatnonzero(~masks[slots, :64].any(axis=1)).tolist():
            if not masks[slots[index]].any():
                self._rows[slots[index]].end(DEAD_END)
        failed = {slot: self._rows[slot].failure for slot in slots if self._rows[slot].failure}
        masks[list(failed)] = -1
        return failed

    def _by_ends(self, slots: Iterable[int]) -> Iterable[tuple[_Ends, list[int]]]:
        groups: dict[_Ends, list[int]] = {}
        for slot in slots:
            groups.setdefault(self._rows[slot].ends, []).append(slot)
        return groups.items()

    @cached_property
    def _tags(self) -> tuple[int, int]:
        """Token ids of `<think>` and `</think>`; -1: not in the vocabulary."""
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
        """Compile in the thread, into the dictionary of the epoch in which it was requested."""
        if compiled is not self._compiled:
            return
        before = psutil.Process().memory_info().rss
        try:
            matcher = self._compile(spec)
            matcher.compute_bitmask()  # the first mask takes longest
        except Exception as error:  # noqa: BLE001  it ends requests, not the worker
            on_compiled(0, repr(error))
            return
        compiled[number] = matcher
        grown = max(0, psutil.Process().memory_info().rss - before)
        on_compiled(grown, matcher.get_error() if matcher.is_error() else "")


def _be_nice() -> None:
    """Let other threads go before this one, on Linux, where a thread has a priority of its own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
