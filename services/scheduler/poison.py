"""Poison requests: requests that kill the processes that handle them.

At workers: a death alone does not show its cause. A request that was in flight at
`MAX_WORKER_DEATHS` - 1 deaths in a row, without a token in between, is a suspect. A suspect runs
alone until its next token, and others are preempted. If the workers die again, nothing else can be
the cause, and the request is given up. The token clears the suspects that are not the cause.

At detokenizers: any stream that a dead detokenizer had opened may be the cause. Such suspects are
sent to a detokenizer in batches, and nothing else until it has confirmed them. The streams of a
failed batch are tried one by one; a stream at whose trial detokenizers die is given up.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from penstock.protocol.poison import MAX_DEATHS, PoisonList, Suspects, digest_of
from penstock.protocol.transport.heartbeat import DeathReports
from penstock.protocol.transport.process import Identity
from penstock.services.scheduler.sequence import MAX_WORKER_DEATHS, TOKEN_BYTES, Sequence

# message to its client
WORKERS_DIED = (
    f"the workers died {MAX_WORKER_DEATHS} times in a row while the request ran, each time before "
    "it got another token; it is not tried again"
)
DETOKENIZERS_DIED = (
    f"{MAX_DEATHS} detokenizers died while they made the text of the request; it is not tried again"
)
TRIAL_BATCH = 64  # streams of one trial


class DetokenizerTrials:
    """The queue of suspects, and the trial that is running."""

    def __init__(self) -> None:
        self.suspects: Suspects[Sequence] = Suspects()
        self.waiting: dict[Sequence, None] = {}
        self.at = b""  # routing id of the detokenizer that must confirm a message; empty: none
        # of the running trial; empty while the detokenizer confirms earlier messages
        self.batch: list[Sequence] = []

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue sequences that were open at a detokenizer that died."""
        for sequence in sequences:
            self.waiting[sequence] = None
            self.suspects.add([sequence])

    def next_batch(self) -> list[Sequence]:
        """Take the next suspects out of the queue; a suspect of a failed trial is alone."""
        failed = [sequence for sequence in self.waiting if self.suspects[sequence]]
        self.batch = failed[:1] or list(self.waiting)[:TRIAL_BATCH]
        for sequence in self.batch:
            del self.waiting[sequence]
        return self.batch

    def passed(self) -> None:
        """End the trial: its batch is confirmed, or was closed."""
        for sequence in self.batch:
            self.suspects.pop(sequence, None)
        self.at, self.batch = b"", []

    def failed(self) -> list[Sequence]:
        """End the trial: its detokenizer died. Return the sequences that are given up."""
        batch, self.at, self.batch = self.batch, b"", []
        return self.blame(batch)

    def blame(self, batch: list[Sequence]) -> list[Sequence]:
        """Count the death at a trial of a batch. Return the sequences that are given up."""
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
    """The deaths of each request, by its digest, and reports of them to the supervisor.

    They outlive the request: a client that aborts it and sends it again does not start at 0.
    """

    def __init__(self, reports: DeathReports) -> None:
        self._known = PoisonList()
        self._reports = reports
        # sequences in flight when workers died, without a token since, and their digests
        self._suspects: dict[Sequence, bytes] = {}

    def admits(self, sequence: Sequence) -> bool:
        """Give a new sequence the deaths of its predecessors. Return False if it must not run."""
        if self._known:
            known = self._known.num_deaths(_digest(sequence))
            sequence.num_deaths = max(sequence.num_deaths, known)
        return sequence.num_deaths < MAX_WORKER_DEATHS

    def remember(self, sequence: Sequence) -> None:
        """Remember the deaths of a sequence that is released, or that it has got a token since."""
        self._suspects.pop(sequence, None)
        got_token = len(sequence.token_ids) > sequence.num_prefill_tokens > 0
        if sequence.num_deaths or (got_token and self._known):
            self._known.put(_digest(sequence), sequence.num_deaths)
        if got_token and not sequence.num_deaths and self._reports.suspects:
            self._reports.clear([_digest(sequence)])

    def clear(self) -> None:
        """Report the suspects that have got a token: they did not kill the workers."""
        if cleared := [sequence for sequence in self._suspects if not sequence.num_deaths]:
            self._reports.clear(map(self._suspects.pop, cleared))

    def report_workers(self, workers: list[tuple[str, int]], suspects: set[Sequence]) -> None:
        """Report workers, by name and pid, of whose death these sequences may be the cause."""
        digests = {sequence: _digest(sequence) for sequence in suspects}
        self._suspects |= digests
        self._reports.died(workers, list(digests.values()))

    def report_detokenizer(self, detokenizer: bytes, suspects: list[Sequence]) -> None:
        """Report a detokenizer that died, by routing id, and its suspects."""
        dead = Identity.decode(detokenizer)
        self._reports.died([(dead.name, dead.pid)], [_digest(sequence) for sequence in suspects])

    def report_found(self, sequence: Sequence) -> None:
        """Remember and report a sequence that is given up."""
        self._suspects.pop(sequence, None)
        digest = _digest(sequence)
        self._known.put(digest, MAX_WORKER_DEATHS)
        self._reports.found(digest)


def _digest(sequence: Sequence) -> bytes:
    """Return the same digest in all replicas and for every attempt: without output, seed, id."""
    prompt = sequence.packed_token_ids()[: sequence.num_prompt_tokens * TOKEN_BYTES]
    return digest_of(prompt, replace(sequence.sampling, seed=None))
