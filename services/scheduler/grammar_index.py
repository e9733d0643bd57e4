"""The grammars that rank 0 has compiled, and the sequences that wait for one. No I/O, no clock.

A sequence is planned only when its grammar is compiled, so that no step waits for a grammar. Equal
grammars are compiled once. Clients take turns, by what they want to have compiled.
"""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import count

import msgspec

from penstock.protocol.fair_queue import FairQueue
from penstock.protocol.messages.structured import StructuredOutputs
from penstock.protocol.messages.worker import CompileGrammars, GrammarCompiled
from penstock.services.scheduler.sequence import Sequence

# grammars that the worker was sent and has not reported: its thread always has a next one
MAX_COMPILING = 4
# of one worker, if it has no more rows
MAX_GRAMMARS = 256
# of grammars that no sequence has, to be requested again
MAX_UNUSED_BYTES = 256 << 20


class _Grammar:
    """A grammar that sequences have, or had."""

    def __init__(self, key: object, wanted: StructuredOutputs) -> None:
        # its content, or the sequence that has it alone
        self.key = key
        self.wanted = wanted
        # the number is 0 until the grammar is sent to the worker
        self.number = self.num_bytes = 0
        self.is_compiled = False
        # unfinished sequences → whether they wait for it outside of the queue
        self.users: dict[Sequence, bool] = {}


class GrammarIndex:
    """Grammars by content, and their sequences."""

    def __init__(self, max_rows: int) -> None:
        self._most = max(max_rows, MAX_GRAMMARS)
        self._known: dict[object, _Grammar] = {}
        self._of: dict[Sequence, _Grammar] = {}
        # not sent yet
        self._queue: FairQueue[_Grammar] = FairQueue()
        self._sent: dict[int, _Grammar] = {}
        self._compiling: dict[int, _Grammar] = {}
        # compiled, without a sequence; the one that was used last is at the end
        self._unused: OrderedDict[int, _Grammar] = OrderedDict()
        # numbers that the worker must forget
        self._removed: list[int] = []
        self._numbers = count(1)

    # ---- sequences ---------------------------------------------------------------------------

    @property
    def waiting(self) -> Iterator[Sequence]:
        """Sequences that wait for their grammar outside of the queue."""
        return (sequence for sequence, grammar in self._of.items() if grammar.users[sequence])

    @property
    def compiling(self) -> set[Sequence]:
        """Sequences whose grammar is being compiled, of which the worker may die."""
        return {user for grammar in self._compiling.values() for user in grammar.users}

    def request(self, sequence: Sequence, *, waits: bool) -> bool:
        """Have a sequence's grammar compiled. Return whether it is, or there is none.

        waits: whether it stays outside of the queue until `on_compiled` returns it.
        """
        wanted = sequence.sampling.structured_outputs
        if wanted is None:
            return True
        grammar = self._of.get(sequence)
        if grammar is None:
            key = msgspec.msgpack.encode(wanted)
            grammar = self._known.setdefault(key, _Grammar(key, wanted))
            self._of[sequence] = grammar
            self._unused.pop(grammar.number, None)
        if not grammar.number and grammar not in self._queue:
            self._queue.add(grammar, sequence.client, sequence.priority)
        sequence.grammar = grammar.number if grammar.is_compiled else 0
        grammar.users[sequence] = waits and not grammar.is_compiled
        return grammar.is_compiled

    def release(self, sequence: Sequence) -> bool:
        """Forget a sequence. Return whether it waited outside of the queue."""
        grammar = self._of.pop(sequence, None)
        if grammar is None:
            return False
        waited = grammar.users.pop(sequence)
        if not grammar.users:
            self._rest(grammar)
        return waited

    def isolate(self, sequence: Sequence) -> bool:
        """Give a sequence whose matcher failed a grammar of its own. Return False if it has one.

        Rows with one grammar share a lexer: when one row exceeds its limits, the others fail, too.
        """
        shared = self._of[sequence]
        if shared.key is sequence:
            return False
        if self._known.get(shared.key) is shared:
            del self._known[shared.key]  # other sequences get a new one
        self.release(sequence)
        own = self._known[sequence] = self._of[sequence] = _Grammar(sequence, shared.wanted)
        own.users[sequence] = False
        return True

    def _rest(self, grammar: _Grammar) -> None:
        """Keep a grammar that no sequence has any more, if others may get it."""
        if not grammar.number:
            self._drop(grammar)
        elif grammar.is_compiled:
            self._unused[grammar.number] = grammar
            is_known = self._known.get(grammar.key) is grammar
            if not is_known or isinstance(grammar.key, Sequence):
                self._drop(grammar)
            self._evict()

    def _drop(self, grammar: _Grammar) -> None:
        self._queue.remove(grammar)
        if self._known.get(grammar.key) is grammar:
            del self._known[grammar.key]
        if self._sent.pop(grammar.number, None):
            self._unused.pop(grammar.number, None)
            self._removed.append(grammar.number)

    # ---- the worker --------------------------------------------------------------------------

    def take_message(self, epoch: int, alone: Sequence | None = None) -> CompileGrammars | None:
        """Return what the worker must get, if anything.

        alone: compile only the grammar of this suspect, which nobody else may share: otherwise a
        death would not show whose grammar is the cause.
        """
        added = []
        if alone in self._of and not self._of[alone].number:
            self.isolate(alone)
        while grammar := self._of.get(alone) if alone else self._next():
            if grammar.number:
                break
            self._queue.remove(grammar)
            grammar.number = next(self._numbers)
            self._sent[grammar.number] = self._compiling[grammar.number] = grammar
            added.append((grammar.number, grammar.wanted))
        removed, self._removed = self._removed, []
        return CompileGrammars(epoch, added, removed) if added or removed else None

    def _next(self) -> _Grammar | None:
        if self._queue and len(self._sent) >= self._most and self._unused:
            self._drop(next(iter(self._unused.values())))
        has_room = len(self._sent) < self._most and len(self._compiling) < MAX_COMPILING
        return self._queue.take() if has_room else None

    def _evict(self) -> None:
        num_bytes = sum(grammar.num_bytes for grammar in self._unused.values())
        while num_bytes > MAX_UNUSED_BYTES:
            oldest = next(iter(self._unused.values()))
            num_bytes -= oldest.num_bytes
            self._drop(oldest)

    def on_compiled(self, message: GrammarCompiled) -> tuple[list[Sequence], list[Sequence]]:
        """Return sequences that need not wait any longer, or those that can't be served."""
        grammar = self._compiling.pop(message.number, None)
        if grammar is None:
            return [], []
        if message.error:
            self._drop(grammar)
            grammar.number = 0
            return [], list(grammar.users)
        grammar.is_compiled, grammar.num_bytes = True, message.num_bytes
        ready = [sequence for sequence, waits in grammar.users.items() if waits]
        for sequence in grammar.users:
            sequence.grammar, grammar.users[sequence] = grammar.number, False
        if not grammar.users:
            self._rest(grammar)
        return ready, []

    def lose(self) -> None:
        """Have all grammars that sequences have compiled again: the worker died."""
        lost, self._sent = self._sent, {}
        self._compiling.clear()
        self._unused.clear()
        self._removed.clear()
        for grammar in lost.values():
            grammar.number, grammar.is_compiled = 0, False
            if not grammar.users:
                self._drop(grammar)
                continue
            for sequence in grammar.users:
                sequence.grammar = 0
            first = next(iter(grammar.users))
            self._queue.add(grammar, first.client, first.priority)
