"""The order in which waiting sequences are admitted to the running batch. No I/O, no clock."""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import count, islice

from penstock.protocol.fair_queue import FairQueue
from penstock.services.scheduler.sequence import Sequence

MAX_RETRIED = 4  # held sequences that are tried again in one step, the oldest first
# new sequences that may fail to get blocks in one step; the others wait for the next one
MAX_TRIES = 4


class WaitingQueue:
    """Sequences without a place in the running batch, in four parts.

    1. Suspects go first: each runs alone, so that the others can continue together.
    2. Preempted sequences; only suspects pass them.
    3. Held sequences: the first of a client that did not get its blocks; one a client. Others may
       pass a held sequence, until as many tokens have passed as it has itself: from then on freed
       blocks are reserved for it. So no sequence starves.
    4. New sequences: round-robin over clients, by (priority, arrival) in one client.

    The candidates of a step do not depend on the length of the queue.
    """

    def __init__(self) -> None:
        self._suspects: OrderedDict[Sequence, None] = OrderedDict()
        self._preempted: OrderedDict[Sequence, None] = OrderedDict()
        self._held: OrderedDict[Sequence, int] = OrderedDict()  # → tokens that have passed it
        self._holding: set[str] = set()  # clients of held sequences
        self._new: FairQueue[Sequence] = FairQueue()
        self._admissions = count()

    def __len__(self) -> int:
        return len(self._suspects) + len(self._preempted) + len(self._held) + len(self._new)

    def __iter__(self) -> Iterator[Sequence]:
        """Yield sequences that others can't pass first; new sequences by arrival."""
        yield from self._suspects
        yield from self._preempted
        yield from self._held
        yield from self._new

    def add(self, sequence: Sequence) -> None:
        """Append a new sequence, which may be a suspect of another replica."""
        if sequence.is_suspect:
            self._suspects[sequence] = None
        elif sequence.admission >= 0:
            self._preempted[sequence] = None
        else:
            self._new.add(sequence, sequence.client, sequence.priority)

    def put_back(self, sequence: Sequence) -> None:
        """Put a preempted sequence before all others, or a suspect before all suspects."""
        queue = self._suspects if sequence.is_suspect else self._preempted
        queue[sequence] = None
        queue.move_to_end(sequence, last=False)

    @property
    def suspect(self) -> Sequence | None:
        """The suspect that is tried next, if any."""
        return next(iter(self._suspects), None)

    def remove(self, sequence: Sequence) -> None:
        if self._held.pop(sequence, None) is not None:
            self._holding.discard(sequence.client)
        elif not self._new.remove(sequence):
            del (self._suspects if sequence in self._suspects else self._preempted)[sequence]

    def candidates(self) -> Iterator[Sequence]:
        """Yield sequences in the order in which a step may admit them.

        For each one the caller calls `admit` or `hold` before the next one, or stops.
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
        """Remove a candidate that has its blocks; its client has had its turn."""
        for held in islice(self._held, MAX_RETRIED):
            if held is sequence:
                break
            self._held[held] += len(sequence.token_ids)
        self.remove(sequence)
        self._new.end_turn(sequence.client)
        if sequence.admission < 0:
            sequence.admission = next(self._admissions)

    def hold(self, sequence: Sequence) -> None:
        """Hold a candidate that did not get its blocks, unless its client has a held one."""
        if sequence in self._new and sequence.client not in self._holding:
            self._new.remove(sequence)
            self._held[sequence] = 0
            self._holding.add(sequence.client)

    def _may_pass(self, before: Sequence | None = None) -> bool:
        """Return whether all held sequences that are retried, up to `before`, may be passed."""
        for sequence, num_passed in islice(self._held.items(), MAX_RETRIED):
            if sequence is before:
                break
            if num_passed >= len(sequence.token_ids):
                return False
        return True
