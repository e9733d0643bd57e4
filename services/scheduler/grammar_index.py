"""The grammars on rank 0, and the sequences that wait for a grammar. No I/O, no clock.

A sequence is planned only when its grammar is compiled, so that no step waits for a grammar. Equal
grammars are compiled once. Clients with grammars to compile take turns.
"""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import count

import msgspec

from penstock.protocol.fair_queue import FairQueue
from penstock.protocol.messages.structured import StructuredOutputs
from penstock.protocol.messages.worker import CompileGrammars, GrammarCompiled
from penstock.services.scheduler.sequence import Sequence

# grammars sent to the worker and not compiled yet: enough to keep its compiler thread busy
MAX_COMPILING = 4
# maximum number of grammars on a worker with fewer rows than this number
MAX_GRAMMARS = 256
# memory of unused grammars, which are kept for later requests
MAX_UNUSED_BYTES = 256 << 20


class _Grammar:
    """A grammar that sequences use or have used."""

    def __init__(self, key: object, wanted: StructuredOutputs) -> None:
        # the grammar's content, or its only sequence for an isolated grammar
        self.key = key
        self.wanted = wanted
        # `number` is 0 until the grammar is sent to the worker
        self.number = self.num_bytes = 0
        self.is_compiled = False
        # unfinished sequence → whether it waits for the grammar outside of the waiting queue
        self.users: dict[Sequence, bool] = {}


class GrammarIndex:
    """The grammars by content, with their sequences."""

    def __init__(self, max_rows: int) -> None:
        self._most = max(max_rows, MAX_GRAMMARS)
        self._known: dict[object, _Grammar] = {}
        self._of: dict[Sequence, _Grammar] = {}
        # grammars that are not sent yet
        self._queue: FairQueue[_Grammar] = FairQueue()
        self._sent: dict[int, _Grammar] = {}
        self._compiling: dict[int, _Grammar] = {}
        # compiled grammars without a sequence, most recently used last
        self._unused: OrderedDict[int, _Grammar] = OrderedDict()
        # numbers of grammars that the worker must drop
        self._removed: list[int] = []
        self._numbers = count(1)

    # ---- sequences ---------------------------------------------------------------------------

    @property
    def waiting(self) -> Iterator[Sequence]:
        """Sequences that wait for their grammar outside of the waiting queue."""
        return (sequence for sequence, grammar in self._of.items() if grammar.users[sequence])

    @property
    def compiling(self) -> set[Sequence]:
        """Sequences whose grammar is being compiled, which may kill the worker."""
        return {user for grammar in self._compiling.values() for user in grammar.users}

    def request(self, sequence: Sequence, *, waits: bool) -> bool:
        """Request the compilation of a sequence's grammar, if it has one.

        Return True if the sequence has no grammar, or if its grammar is already compiled.
        waits: whether the sequence stays outside of the waiting queue until `on_compiled`.
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
        """Forget a sequence. Return whether the sequence waited outside of the waiting queue."""
        grammar = self._of.pop(sequence, None)
        if grammar is None:
            return False
        waited = grammar.users.pop(sequence)
        if not grammar.users:
            self._rest(grammar)
        return waited

    def isolate(self, sequence: Sequence) -> bool:
        """Give a sequence whose matcher failed a grammar of its own.

        Rows with the same grammar share a lexer: when a row exceeds its limits, all these rows
        fail. Return False if the sequence already has its own grammar.
        """
        shared = self._of[sequence]
        if shared.key is sequence:
            return False
        if self._known.get(shared.key) is shared:
            del self._known[shared.key]  # other sequences get a new grammar
        self.release(sequence)
        own = self._known[sequence] = self._of[sequence] = _Grammar(sequence, shared.wanted)
        own.users[sequence] = False
        return True

    def _rest(self, grammar: _Grammar) -> None:
        """Keep an unused grammar if later sequences may get it; otherwise drop it."""
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
        """Return the message to rank 0, if any.

        alone: a suspect. Only its grammar is compiled, and no other sequence may share the grammar.
        So the suspect is the only possible cause of a worker failure.
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
        """Return (sequences to queue, sequences to fail) after a compilation."""
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
        """Requeue all grammars of sequences for compilation after a worker failure."""
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
