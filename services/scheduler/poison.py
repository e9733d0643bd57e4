"""Poison requests at the scheduler: what it remembers of them when they are gone."""

from collections.abc import Iterable

from msgspec.structs import replace

from penstock.protocol.messages.plan import pack
from penstock.protocol.poison import DeathReports, PoisonList, digest_of
from penstock.protocol.transport.process import Identity
from penstock.services.scheduler.in_flight_plan import Step
from penstock.services.scheduler.sequence import Sequence
from penstock.services.scheduler.suspects import MAX_DEATHS


class Poison:
    """Remembers requests by their digests, over an abort, and reports deaths to the supervisor.

    A client that leaves and sends the same request again does not begin at no death.
    """

    def __init__(self, reports: DeathReports) -> None:
        self._known = PoisonList()
        self._reports = reports

    def arrived(self, sequence: Sequence) -> bool:
        """Give a new sequence the deaths of its predecessors; False if it is not to run."""
        if len(self._known):
            known = self._known.num_deaths(_digest(sequence))
            sequence.num_deaths = max(sequence.num_deaths, known)
        return sequence.num_deaths < MAX_DEATHS

    def left(self, sequence: Sequence) -> None:
        """A sequence is released: remember its deaths, or that it has got a token since."""
        got_token = len(sequence.token_ids) > sequence.num_prefill_tokens > 0
        if sequence.num_deaths or (got_token and len(self._known)):
            self._known.put(_digest(sequence), sequence.num_deaths)

    def died(self, workers: list[tuple[str, int]], in_flight: Iterable[Step]) -> None:
        """Workers, by name and pid, died with these steps in flight."""
        suspects = {sequence for step in in_flight for sequence in step.sequences}
        self._reports.died(workers, [_digest(sequence) for sequence in suspects])

    def died_at(
        self, detokenizer: bytes, suspects: list[Sequence], given_up: list[Sequence]
    ) -> list[Sequence]:
        """A detokenizer, by its routing id, died with these sequences. Return `given_up`."""
        dead = Identity.decode(detokenizer)
        self._reports.died([(dead.name, dead.pid)], [_digest(one) for one in suspects])
        return given_up

    def found(self, sequence: Sequence) -> None:
        """A sequence is given up."""
        digest = _digest(sequence)
        self._known.put(digest, MAX_DEATHS)
        self._reports.found(digest)


def _digest(sequence: Sequence) -> bytes:
    """Equal in all replicas, and for every attempt: without output, seed or id."""
    prompt = pack(sequence.token_ids[: sequence.num_prompt_tokens])
    return digest_of(prompt, replace(sequence.sampling, seed=None))
