"""Validation of grammars: a grammar that can't be served is refused before it reaches a worker.

Compilation in llguidance can't be interrupted. Some schemas take minutes within all its limits, and
some grammars overflow its stack. So each grammar is compiled in a child process, while this process
continues. A grammar that compiles there also compiles in the worker, which has the same limits and
a larger stack.
"""

import logging
import os
import re
import signal
from collections import OrderedDict
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from hashlib import sha256
from pathlib import Path

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from penstock.protocol.fair_queue import FairQueue
from penstock.protocol.messages.structured import GRAMMAR_LIMITS, inexact, maps_in, schemas_in
from penstock.protocol.transport.event_loop import EventLoop
from penstock.services.tokenizer.child import end_child, start_child

# Limit on CPU time, which other load on the machine may double. So features that are known to be
# slow have exact limits of their own, within which compilation takes up to 0.5 s.
MAX_COMPILE_SECONDS = 2.0
# pairs of `patternProperties` in one object: llguidance compares each pair
MAX_PATTERN_PAIRS = 20_000
# sum of all values of `multipleOf`, without decimal points: a value takes as many states
MAX_MULTIPLES = 100_000
# Some limits apply only while text is matched. Each step may cost as much as compilation.
MATCHED_TOKENS = 3
TOO_LARGE = "its repetitions expand to too many states; use smaller repetition counts"
MAX_STACK_BYTES = 1 << 20
MAX_CHILDREN = 2
RETRY_SECONDS = 1.0  # wait after a failed fork
# maximum number of cached results
MAX_KNOWN = 1024
MAX_REASON_BYTES = 2048
# niceness of the children: requests without a new grammar have priority
NICENESS = 5

log = logging.getLogger("tokenizer")
# called with the reason why a grammar can't be served, or with an empty string
OnChecked = Callable[[str], None]


class GrammarChecker:
    """Check of grammars by compilation in child processes. Clients take turns.

    Equal grammars are checked once, and the result is cached. A client has at most one check at a
    time, so that other clients need not wait for its slow grammars.
    """

    def __init__(self, folder: Path, loop: EventLoop) -> None:
        # loaded before the forks, so that children need not load it
        self._tokenizer = LLTokenizer(str(folder / "tokenizer.json"))
        self._loop = loop
        # results by hash of the grammar, most recently used last
        self._reasons: OrderedDict[bytes, str] = OrderedDict()
        self._asking: dict[str, list[OnChecked]] = {}
        self._waiting: FairQueue[str] = FairQueue()
        # grammar → the first client that sent it
        self._clients: dict[str, str] = {}
        # clients whose grammar is being checked
        self._checking: set[str] = set()
        self._is_late = False  # a fork failed; a timer retries it

    def check(self, grammar: str, client: str, on_checked: OnChecked) -> None:
        """Check a grammar that passed `excess`. Call `on_checked` once, now or later."""
        known = _hash_of(grammar)
        if known in self._reasons:
            self._reasons.move_to_end(known)
            on_checked(self._reasons[known])
        elif grammar in self._asking:
            self._asking[grammar].append(on_checked)
        else:
            self._asking[grammar] = [on_checked]
            self._clients[grammar] = client
            self._waiting.add(grammar, client)
            self._check_next()

    def _check_next(self) -> None:
        """Fork a child for the next grammar, unless MAX_CHILDREN run."""
        grammar = self._waiting.first(skipped=self._checking)
        if grammar is None or len(self._checking) == MAX_CHILDREN:
            return
        compile_it = partial(_compile, self._tokenizer, grammar)
        try:
            pid, reader = start_child(compile_it, MAX_COMPILE_SECONDS, MAX_STACK_BYTES)
        except OSError as error:  # the limit of processes, of memory or of descriptors
            self._check_later(error)
            return
        client = self._clients[grammar]
        self._waiting.end_turn(client)
        self._waiting.remove(grammar)
        self._checking.add(client)

        def on_end() -> None:
            self._checking.remove(client)
            self._answer(grammar, _reason(pid, reader))
            self._check_next()

        self._loop.add_file(reader, on_end)

    def _check_later(self, error: OSError) -> None:
        """Retry the waiting grammars after RETRY_SECONDS, because no child could be forked."""
        if self._is_late:
            return
        self._is_late = True
        log.warning("no grammar can be checked: %s; trying again", error)

        def check() -> None:
            self._is_late = False
            for _ in range(MAX_CHILDREN):
                self._check_next()

        self._loop.call_later(RETRY_SECONDS, check)

    def _answer(self, grammar: str, reason: str) -> None:
        self._reasons[_hash_of(grammar)] = reason
        if len(self._reasons) > MAX_KNOWN:
            self._reasons.popitem(last=False)
        del self._clients[grammar]
        for on_checked in self._asking.pop(grammar):
            on_checked(reason)


def _hash_of(grammar: str) -> bytes:
    return sha256(grammar.encode()).digest()


def excess(grammar: str) -> str:
    """Return why a grammar would compile too slowly or be inexact; an empty string if neither."""
    (parts,) = msgspec.json.decode(grammar)["grammars"]
    schemas = [schema for _, _, schema in schemas_in(parts["lark_grammar"])]
    num_multiples = 0
    for schema in maps_in(schemas):
        if isinstance(patterns := schema.get("patternProperties"), dict):
            num_pairs = len(patterns) * (len(patterns) - 1) // 2
            if num_pairs > MAX_PATTERN_PAIRS:
                return (
                    f"patternProperties: got {len(patterns)} of one object, "
                    f"{num_pairs} pairs, expected up to {MAX_PATTERN_PAIRS}"
                )
        multiple = schema.get("multipleOf")
        if isinstance(multiple, int | float) and not isinstance(multiple, bool):
            digits = Decimal(str(multiple)).normalize().as_tuple()
            if isinstance(digits.exponent, int):  # it is finite
                number = int("".join(map(str, digits.digits)))
                num_multiples += number * 10 ** max(0, min(9, digits.exponent))
    if num_multiples > MAX_MULTIPLES:
        return (
            f"multipleOf: got {num_multiples} in total, without decimal points, "
            f"expected up to {MAX_MULTIPLES}"
        )
    return inexact(schemas)


def _reason(pid: int, reader: int) -> str:
    """Return the reason that a child wrote, or the reason for its death."""
    exit_code, reason = end_child(pid, reader)
    if exit_code == -signal.SIGPROF:
        return f"compiling it takes more than {MAX_COMPILE_SECONDS} s, which is the limit"
    if exit_code > 0:
        log.error("the compiler of grammars ended with exit code %d at a grammar", exit_code)
        return "the compiler fails at it"
    if exit_code:
        return "it is nested too deep to be compiled"
    return reason.decode(errors="replace")


def _compile(tokenizer: LLTokenizer, grammar: str) -> bytes:
    os.nice(NICENESS)
    return _failure(tokenizer, grammar).encode()[:MAX_REASON_BYTES]


def _failure(tokenizer: LLTokenizer, grammar: str) -> str:
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**GRAMMAR_LIMITS))
    for step in range(MATCHED_TOKENS):
        if matcher.is_error() or matcher.is_stopped():
            break
        token_id = _first_token(matcher)
        if matcher.is_error():
            return "no text matches it, or its beginning is too complex" if step == 0 else TOO_LARGE
        if token_id is None:
            break
        matcher.consume_token(token_id)  # expands repetitions, which compilation does not
        if matcher.is_error():
            return TOO_LARGE
    return _without_source(matcher.get_error())


def _without_source(error: str) -> str:
    """Return llguidance's error without the grammar's source, which may be generated."""
    reason = re.split(r"\n +\d+ \| ", error, maxsplit=1)[0]
    reason = re.sub(
        r"^at \d+\(\d+\): (?:failed to compile JSON schema: |(?=invalid reg))", "", reason
    )
    return re.sub(r"regex parse error:.*\nerror: ", "", reason, flags=re.DOTALL)


def _first_token(matcher: LLMatcher) -> int | None:
    """Return the lowest allowed token id; None if no token is allowed."""
    words = np.frombuffer(matcher.compute_bitmask(), np.uint32)
    used = np.flatnonzero(words)
    if not len(used):
        return None
    word = int(words[used[0]])
    return int(used[0]) * 32 + (word & -word).bit_length() - 1
