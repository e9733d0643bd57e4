"""Grammars on their way in: one that can't be served is refused before it reaches a worker.

Compiling runs in llguidance, which can't be interrupted, which some schemas keep busy for minutes
within all its limits, and whose stack some grammars overflow. So each grammar is compiled in a
child process; meanwhile this process continues. A grammar that compiles there compiles in the
worker, which has the same limits and a larger stack.
"""

import re
import signal
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from penstock.protocol.messages.structured import GRAMMAR_LIMITS
from penstock.protocol.transport.event_loop import EventLoop
from penstock.services.tokenizer.child import end_child, start_child

MAX_COMPILE_SECONDS = 0.5
"""of CPU time: so long may a worker's other rows have to wait for one that is compiled"""
MATCHED_TOKENS = 3
"""Some limits apply only while text is matched; each step may cost as much as compiling."""
TOO_LARGE = "its repetitions expand to too many states; use smaller repetition counts"
MAX_STACK_BYTES = 1 << 20
MAX_CHILDREN = 2
MAX_KNOWN = 256
"""grammars that compiled, to be requested again"""
MAX_REASON_BYTES = 2048

OnChecked = Callable[[str], None]
"""gets the reason why the grammar can't be served, or an empty string"""


class GrammarChecker:
    """Compiles grammars to see whether it can be done."""

    def __init__(self, folder: Path, loop: EventLoop) -> None:
        self._tokenizer = LLTokenizer(str(folder / "tokenizer.json"))
        """loaded here: the children have it without loading it"""
        self._loop = loop
        self._known: dict[str, None] = {}
        self._waiting: deque[tuple[str, OnChecked]] = deque()
        self._num_children = 0

    def check(self, grammar: str, on_checked: OnChecked) -> None:
        """Call `on_checked` once, now or later; `grammar` is in llguidance's format."""
        if grammar in self._known:
            on_checked("")
        else:
            self._waiting.append((grammar, on_checked))
            self._fork()

    def _fork(self) -> None:
        if not self._waiting or self._num_children == MAX_CHILDREN:
            return
        grammar, on_checked = self._waiting.popleft()
        compile_it = partial(_compile, self._tokenizer, grammar)
        pid, reader = start_child(compile_it, MAX_COMPILE_SECONDS, MAX_STACK_BYTES)
        self._num_children += 1

        def on_end() -> None:
            reason = _reason(pid, reader)
            self._num_children -= 1
            if not reason:
                self._remember(grammar)
            on_checked(reason)
            self._fork()

        self._loop.add_file(reader, on_end)

    def _remember(self, grammar: str) -> None:
        self._known[grammar] = None
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]


def _reason(pid: int, reader: int) -> str:
    """Return the child's reason, or that of its end."""
    signal_number, reason = end_child(pid, reader)
    if signal_number == -signal.SIGPROF:
        return f"compiling it takes more than {MAX_COMPILE_SECONDS} s, which is the limit"
    if signal_number:
        return "it is nested too deep to be compiled"
    return reason.decode(errors="replace")


def _compile(tokenizer: LLTokenizer, grammar: str) -> bytes:
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
        matcher.consume_token(token_id)  # expands repetitions, which compiling leaves alone
        if matcher.is_error():
            return TOO_LARGE
    return _without_source(matcher.get_error())


def _without_source(error: str) -> str:
    """Return llguidance's error without the grammar, which the client may not have written."""
    reason = re.split(r"\n +\d+ \| ", error, maxsplit=1)[0]
    reason = re.sub(
        r"^at \d+\(\d+\): (?:failed to compile JSON schema: |(?=invalid reg))", "", reason
    )
    return re.sub(r"regex parse error:.*\nerror: ", "", reason, flags=re.DOTALL)


def _first_token(matcher: LLMatcher) -> int | None:
    """Return the lowest token id that may come next, None if there is none."""
    words = np.frombuffer(matcher.compute_bitmask(), np.uint32)
    used = np.flatnonzero(words)
    if not len(used):
        return None
    word = int(words[used[0]])
    return int(used[0]) * 32 + (word & -word).bit_length() - 1
