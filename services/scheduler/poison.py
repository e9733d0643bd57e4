"""Poison requests, which kill the workers or detokenizers that process them.

Workers: a worker failure does not show its cause. A request that was in flight at
`MAX_WORKER_DEATHS` - 1 consecutive failures, without progress, is a suspect. A suspect runs
alone until its next token; other requests are preempted. If the workers die again, the suspect is a
poison request and fails. If the suspect gets a token, it is cleared.

Detokenizers: any stream that a dead detokenizer had opened may be the cause. These suspects are
sent in batches to a detokenizer, which gets nothing else until it has confirmed the batch. After a
failed batch each of its streams is tried alone. A stream whose trials kill MAX_DEATHS detokenizers
is a poison request and fails.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from penstock.protocol.poison import MAX_DEATHS, PoisonList, Suspects, digest_of
from penstock.protocol.transport.heartbeat import DeathReports
from penstock.protocol.transport.process import Identity
from penstock.services.scheduler.sequence import MAX_WORKER_DEATHS, Sequence

# error message for the client
WORKERS_DIED = (
    f"the workers died {MAX_WORKER_DEATHS} times in a row while the request ran, each time before "
    "it got another token; it is not tried again"
)
DETOKENIZERS_DIED = (
    f"{MAX_DEATHS} detokenizers died while they made the text of the request; it is not tried again"
)
TRIAL_BATCH = 64  # maximum number of streams in a trial


class DetokenizerTrials:
    """The queue of suspects for trials at detokenizers, and the running trial."""

    def __init__(self) -> None:
        self.suspects: Suspects[Sequence] = Suspects()
        self.waiting: dict[Sequence, None] = {}
        self.at = b""  # routing id of the detokenizer that must confirm a message; empty: none
        # suspects of the running trial; empty while the detokenizer confirms earlier messages
        self.batch: list[Sequence] = []

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue sequences with an open stream at a dead detokenizer."""
        for sequence in sequences:
            self.waiting[sequence] = None
            self.suspects.add([sequence])

    def next_batch(self) -> list[Sequence]:
        """Dequeue the suspects of the next trial. A suspect of a failed trial is tried alone."""
        failed = [sequence for sequence in self.waiting if self.suspects.get(sequence)]
        self.batch = failed[:1] or list(self.waiting)[:TRIAL_BATCH]
        for sequence in self.batch:
            del self.waiting[sequence]
        return self.batch

    def passed(self) -> None:
        """End a trial whose batch was confirmed or closed. Clear its suspects."""
        for sequence in self.batch:
            self.suspects.pop(sequence, None)
        self.at, self.batch = b"", []

    def failed(self) -> list[Sequence]:
        """End a trial whose detokenizer died. Return the poison requests."""
        batch, self.at, self.batch = self.batch, b"", []
        return self.blame(batch)

    def blame(self, batch: list[Sequence]) -> list[Sequence]:
        """Count a death at the trial of a batch. Return the poison requests."""
        given_up = self.suspects.blame(batch)
        for sequence in batch:
            if sequence in self.suspects and sequence not in self.batch:
                self.waiting[sequence] = None
        for sequence in given_up:
            self.close(sequence)
        return given_up

    def close(self, sequence: Sequence) -> None:
        self.waiting.pop(sequence, None)
        self.suspects.pop(sequence, None)


class SequencePoison:
    """The number of worker failures of each request, by digest, and reports to the supervisor.

    The numbers outlive the request: an equal request that a client sends again starts with them.
    """

    def __init__(self, reports: DeathReports) -> None:
        self._known = PoisonList()
        self._reports = reports
        # sequence in flight at a worker failure, without a token since → its digest
        self._suspects: dict[Sequence, bytes] = {}

    def admits(self, sequence: Sequence) -> bool:
        """Set the failures of a new sequence from equal requests. Return False if it is poison."""
        if self._known:
            known = self._known.num_deaths(_digest(sequence))
            sequence.num_deaths = max(sequence.num_deaths, known)
        return sequence.num_deaths < MAX_WORKER_DEATHS

    def remember(self, sequence: Sequence) -> None:
        """Remember the worker failures of a released sequence; 0 if it has got a token since."""
        self._suspects.pop(sequence, None)
        got_token = len(sequence.token_ids) > sequence.num_prefill_tokens > 0
        if sequence.num_deaths or (got_token and self._known):
            self._known.put(_digest(sequence), sequence.num_deaths)
        if got_token and not sequence.num_deaths and self._reports.suspects:
            self._reports.clear([_digest(sequence)])

    def clear(self) -> None:
        """Report suspects that have got a token, so they did not kill the workers."""
        if cleared := [sequence for sequence in self._suspects if not sequence.num_deaths]:
            self._reports.clear(map(self._suspects.pop, cleared))

    def report_workers(self, workers: list[tuple[str, int]], suspects: set[Sequence]) -> None:
        """Report dead workers (name, pid), and the sequences that may have killed them."""
        digests = {sequence: _digest(sequence) for sequence in suspects}
        self._suspects |= digests
        self._reports.died(workers, list(digests.values()))

    def report_detokenizer(self, detokenizer: bytes, suspects: list[Sequence]) -> None:
        """Report a dead detokenizer (a routing id) and its suspects."""
        dead = Identity.decode(detokenizer)
        self._reports.died([(dead.name, dead.pid)], [_digest(sequence) for sequence in suspects])

    def report_found(self, sequence: Sequence) -> None:
        """Remember and report a poison request."""
        self._suspects.pop(sequence, None)
        digest = _digest(sequence)
        self._known.put(digest, MAX_WORKER_DEATHS)
        self._reports.found(digest)


def _digest(sequence: Sequence) -> bytes:
    """Return a digest of the request without output, seed and id, equal in all replicas."""
    return digest_of(sequence.packed_prompt, replace(sequence.sampling, seed=None))
