"""Poison requests, which kill the tokenizers that process them."""

from penstock.protocol.poison import MAX_DEATHS, PoisonList, Suspects, digest_of
from penstock.protocol.transport.heartbeat import DeathReports
from penstock.protocol.transport.process import Identity
from penstock.services.gateway.ledger import Work
from penstock.services.gateway.request import WorkRequest

# Fields that do not change the work of a tokenizer: requests that differ only here are equal.
IGNORED_FIELDS = {"seed", "request_id", "stream", "timeout", "priority", "client"}
IGNORED_FIELDS |= {"output_token_ids"}


class TokenizerPoison:
    """Suspects, which may have killed a tokenizer, and poison requests, by digest.

    When a tokenizer dies, all its requests and queries become suspects. A suspect gets a tokenizer
    for itself until the tokenizer has processed it. A suspect that was a tokenizer's only work at
    MAX_DEATHS deaths is poison and fails.
    """

    def __init__(self, reports: DeathReports) -> None:
        self._reports = reports
        self.known = PoisonList()  # empty until a tokenizer has died
        self.suspects: Suspects[Work] = Suspects()

    def num_deaths(self, message: WorkRequest) -> int:
        """Return the number of tokenizer deaths at which an equal request was the only work."""
        return self.known.num_deaths(digest(message))

    def is_poison(self, message: WorkRequest) -> bool:
        return self.num_deaths(message) >= MAX_DEATHS

    def suspect_if_known(self, work: Work) -> None:
        """Suspect new work if an equal request was the only work at a tokenizer's death."""
        if num_deaths := self.num_deaths(work.message):
            self.suspects[work] = num_deaths

    def keeps_apart(self, work: Work, others: list[Work]) -> bool:
        """Return whether `work`, or the only element of `others`, is a suspect."""
        return work in self.suspects or (len(others) == 1 and others[0] in self.suspects)

    def blame(self, tokenizer: bytes, lost: list[Work]) -> Work | None:
        """Suspect the work of a dead tokenizer (a routing id). Return the poison work, if any."""
        dead = Identity.decode(tokenizer)
        self._reports.died([(dead.name, dead.pid)], [digest(work.message) for work in lost])
        self.suspects.add(lost)
        if len(lost) != 1:
            return None
        poison = self.suspects.blame(lost)
        self.known.put(digest(lost[0].message), self.suspects[lost[0]])
        return poison[0] if poison else None

    def clear(self, work: Work) -> None:
        """Clear a suspect that a tokenizer has processed, with the deaths of equal requests."""
        if self.suspects.pop(work, None) is not None:
            self.known.put(digest(work.message), 0)
            self._reports.clear([digest(work.message)])

    def learn(self, digests: list[bytes]) -> None:
        """Refuse poison requests of an earlier gateway, whose digests the supervisor reports."""
        for poison in digests:
            self.known.put(poison, MAX_DEATHS)

    def give_up(self, message: WorkRequest) -> bytes:
        """Refuse equal requests from now on. Return the request's digest."""
        poison = digest(message)
        self.known.put(poison, MAX_DEATHS)
        self._reports.found(poison)
        return poison


def digest(message: WorkRequest) -> bytes:
    """Return a digest of the fields that tokenizers use: equal requests have equal digests."""
    fields = [field for field in message.__struct_fields__ if field not in IGNORED_FIELDS]
    return digest_of(type(message).__name__, [getattr(message, field) for field in fields])
