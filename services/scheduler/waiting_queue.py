"""The order in which waiting sequences join the running batch. No I/O, no clock."""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import count, islice

from penstock.protocol.fair_queue import Entry, FairQueue
from penstock.services.scheduler.sequence import Sequence, Status

MAX_RETRIED = 4  # held sequences that a step retries, the oldest first
# new sequences that may fail to get blocks in a step, before the step tries no more
MAX_TRIES = 4


class WaitingQueue:
    """The waiting sequences, in five queues.

    1. Suspects, which go first. Each suspect runs alone, so that the others can continue together.
    2. Preempted sequences. Only suspects can pass them.
    3. Held sequences, at most one per client: the client's first sequence without enough blocks.
       Other sequences may pass a held sequence until their tokens add up to the held sequence's
       own length. Then freed blocks are reserved for the held sequence, so no sequence starves.
    4. Sequences that await blocks which a running sequence will compute for them.
    5. New sequences: round-robin over clients, by (priority, arrival) within a client.

    The number of candidates in a step does not depend on the length of the queue, except that each
    new sequence may begin to await blocks. Then it returns to its place among the new ones.
    """

    def __init__(self) -> None:
        self._suspects: OrderedDict[Sequence, None] = OrderedDict()
        self._preempted: OrderedDict[Sequence, None] = OrderedDict()
        # held sequence → number of tokens of the sequences that have passed it
        self._held: OrderedDict[Sequence, int] = OrderedDict()
        self._holding: set[str] = set()  # clients of held sequences
        # (entry of `_new`, running sequence, position) of each that awaits the running one's blocks
        self._awaiting: dict[Sequence, tuple[Entry[Sequence], Sequence, int]] = {}
        self._new: FairQueue[Sequence] = FairQueue()
        self._admissions = count()

    def __len__(self) -> int:
        num_tried = len(self._suspects) + len(self._preempted) + len(self._held)
        return num_tried + len(self._awaiting) + len(self._new)

    def __iter__(self) -> Iterator[Sequence]:
        """Yield all sequences in the order of the queues; new sequences by arrival."""
        yield from self._suspects
        yield from self._preempted
        yield from self._held
        yield from self._awaiting
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
            queues = self._awaiting, self._suspects, self._preempted
            del next(queue for queue in queues if sequence in queue)[sequence]

    def candidates(self) -> Iterator[Sequence]:
        """Yield sequences in the order in which a step may admit them.

        The caller must `admit` or `hold` each sequence, or let it `await_blocks`, before it takes
        the next, or stop.
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
        if self._awaiting:
            self._end_waits()
        skipped: set[str] = set()
        num_failed = 0
        while num_failed < MAX_TRIES and self._may_pass():
            if (new := self._new.first(skipped)) is None:
                return
            yield new
            if new in self._new:
                skipped.add(new.client)
            num_failed += new in self._new or new in self._held

    def _end_waits(self) -> None:
        """Put sequences back that await nothing any more."""
        for sequence, (entry, other, end) in list(self._awaiting.items()):
            if other.status is not Status.RUNNING or other.num_planned_tokens >= end:
                del self._awaiting[sequence]
                self._new.put_back(entry)

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

    def hold(self, sequence: Sequence) -> None:
        """Hold a candidate without enough blocks, unless its client has a held sequence."""
        if sequence in self._new and sequence.client not in self._holding:
            self._new.remove(sequence)
            self._held[sequence] = 0
            self._holding.add(sequence.client)

    def await_blocks(self, sequence: Sequence, other: Sequence, end: int) -> None:
        """Let a new candidate await what another computes up to a position. Any may pass it."""
        if entry := self._new.remove(sequence):
            self._awaiting[sequence] = entry, other, end

    def _may_pass(self, before: Sequence | None = None) -> bool:
        """Return whether all retried held sequences ahead of `before` may be passed."""
        for sequence, num_passed in islice(self._held.items(), MAX_RETRIED):
            if sequence is before:
                break
            if num_passed >= len(sequence.token_ids):
                return False
        return True
