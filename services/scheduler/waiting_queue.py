"""The order in which waiting sequences join the running batch. No I/O, no clock."""

import math
from collections import OrderedDict
from collections.abc import Iterator
from itertools import count, islice

from penstock.protocol.fair_queue import FairQueue
from penstock.services.scheduler.sequence import Sequence

MAX_RETRIED = 4  # held sequences that a step retries, the oldest first
# new sequences that may fail to get blocks in a step, before the step tries no more
MAX_TRIES = 4


class WaitingQueue:
    """The waiting sequences, in four queues.

    1. Suspects, which go first. Each suspect runs alone, so that the others can continue together.
    2. Preempted sequences. Only suspects can pass them.
    3. Held sequences, at most one per client: the client's first sequence without enough blocks.
       Other sequences may pass a held sequence until their tokens add up to the held sequence's
       own length. Then freed blocks are reserved for the held sequence, so no sequence starves.
       If it waits for a running one to compute blocks that it may share, any may pass it.
    4. New sequences: round-robin over clients, by (priority, arrival) within a client.

    The number of candidates in a step does not depend on the length of the queue.
    """

    def __init__(self) -> None:
        self._suspects: OrderedDict[Sequence, None] = OrderedDict()
        self._preempted: OrderedDict[Sequence, None] = OrderedDict()
        # held sequence → number of tokens of the sequences that have passed it; -inf: any may pass
        self._held: OrderedDict[Sequence, float] = OrderedDict()
        self._holding: set[str] = set()  # clients of held sequences
        self._new: FairQueue[Sequence] = FairQueue()
        self._admissions = count()

    def __len__(self) -> int:
        return len(self._suspects) + len(self._preempted) + len(self._held) + len(self._new)

    def __iter__(self) -> Iterator[Sequence]:
        """Yield all sequences in the order of the queues; new sequences by arrival."""
        yield from self._suspects
        yield from self._preempted
        yield from self._held
        yield from self._new

    def add(self, sequence: Sequence) -> None:
        """Append a sequence to its queue. A new sequence may be a suspect of another replica."""
        if sequence.is_suspect:
            self._suspects[sequence] = None
        elif sequence.admission >= 0:
            self._preempted[sequence] = None
        else:
            self._new.add(sequence, sequence.client, sequence.priority)

    def put_back(self, sequence: Sequence) -> None:
        """Put a preempted sequence at the head of its queue, a suspect ahead of all suspects."""
        queue = self._suspects if sequence.is_suspect else self._preempted
        queue[sequence] = None
        queue.move_to_end(sequence, last=False)

    @property
    def suspect(self) -> Sequence | None:
        """The suspect of the next trial, if any."""
        return next(iter(self._suspects), None)

    def remove(self, sequence: Sequence) -> None:
        if self._held.pop(sequence, None) is not None:
            self._holding.discard(sequence.client)
        elif not self._new.remove(sequence):
            del (self._suspects if sequence in self._suspects else self._preempted)[sequence]

    def candidates(self) -> Iterator[Sequence]:
        """Yield sequences in the order in which a step may admit them.

        The caller must `admit` or `hold` each sequence before it takes the next, or stop.
        """
        for queue in (self._suspects, self._preempted):
            while queue:
                yield (sequence := next(iter(queue)))
                if sequence in queue:
                    return
        for sequence in list(islice(self._held, MAX_RETRIED)):
            if not self._may_pass(before=sequence):
                return
            yield sequence
        skipped: set[str] = set()
        num_failed = 0
        while num_failed < MAX_TRIES and self._may_pass():
            if (new := self._new.first(skipped)) is None:
                return
            yield new
            if new in self._new:
                skipped.add(new.client)
            num_failed += new in self._new or new in self._held

    def admit(self, sequence: Sequence) -> None:
        """Remove an admitted candidate. End the turn of its client."""
        for held in islice(self._held, MAX_RETRIED):
            if held is sequence:
                break
            self._held[held] += len(sequence.token_ids)
        self.remove(sequence)
        self._new.end_turn(sequence.client)
        if sequence.admission < 0:
            sequence.admission = next(self._admissions)

    def hold(self, sequence: Sequence, awaits: bool = False) -> None:
        """Hold a candidate without enough blocks, unless its client has a held sequence.

        awaits: it awaits blocks that a running sequence computes, and any number may pass it.
        """
        if sequence in self._new and sequence.client not in self._holding:
            self._new.remove(sequence)
            self._held[sequence] = 0
            self._holding.add(sequence.client)
        if sequence in self._held:
            self._held[sequence] = -math.inf if awaits else max(0, self._held[sequence])

    def _may_pass(self, before: Sequence | None = None) -> bool:
        """Return whether all retried held sequences ahead of `before` may be passed."""
        for sequence, num_passed in islice(self._held.items(), MAX_RETRIED):
            if sequence is before:
                break
            if num_passed >= len(sequence.token_ids):
                return False
        return True
