"""Streams whose detokenizer died: which of them may have killed it is found by trials.

A detokenizer has many streams, and any that it was told of may be the cause. Such suspects are told
to a detokenizer in batches, and nothing else until it has confirmed them. A batch that kills it is
told stream by stream; a stream at whose trial detokenizers die is given up.
"""

from collections.abc import Iterable

from penstock.services.scheduler.sequence import Sequence

BATCH = 64
MAX_DEATHS = 2
"""of detokenizers at which a sequence was in a failed trial; at the last one alone"""
GIVEN_UP = (
    f"{MAX_DEATHS} detokenizers died while they made the text of the request; it is not tried again"
)


class Trials:
    """The queue of suspects, and the trial that runs. No sockets."""

    def __init__(self) -> None:
        self.waiting: dict[int, Sequence] = {}
        """by stream id"""
        self.at = b""
        """routing id of the detokenizer that is to confirm something; empty: none"""
        self.batch: list[Sequence] = []
        """what it is told alone; empty while it confirms what it was told before"""
        self._num_deaths: dict[int, int] = {}
        """at trials, by stream id, of all suspects"""

    def add(self, sequences: Iterable[Sequence]) -> None:
        """These were told to a detokenizer that died."""
        for sequence in sequences:
            self.waiting[sequence.stream_id] = sequence
            self._num_deaths.setdefault(sequence.stream_id, 0)

    def next_batch(self) -> list[Sequence]:
        """Take the next suspects out of the queue: one that was in a failed trial is alone."""
        waiting = list(self.waiting.values())
        known = [one for one in waiting if self._num_deaths[one.stream_id]]
        self.batch = known[:1] or waiting[:BATCH]
        for sequence in self.batch:
            del self.waiting[sequence.stream_id]
        return self.batch

    def passed(self) -> None:
        """The batch is confirmed, or was closed."""
        for sequence in self.batch:
            self._num_deaths.pop(sequence.stream_id, None)
        self.at, self.batch = b"", []

    def failed(self) -> list[Sequence]:
        """The detokenizer died at the batch; return what is given up of it."""
        batch, self.at, self.batch = self.batch, b"", []
        for sequence in batch:
            if sequence.stream_id in self._num_deaths:  # else it was closed meanwhile
                self._num_deaths[sequence.stream_id] += 1
                self.waiting[sequence.stream_id] = sequence
        given_up = [
            one
            for one in batch
            if len(batch) == 1 and self._num_deaths.get(one.stream_id, 0) >= MAX_DEATHS
        ]
        for sequence in given_up:
            self.close(sequence)
        return given_up

    def close(self, sequence: Sequence) -> None:
        """Nothing more is wanted of a sequence."""
        self.waiting.pop(sequence.stream_id, None)
        self._num_deaths.pop(sequence.stream_id, None)
