"""Poison requests, which kill the tokenizers that work at them."""

from penstock.protocol.poison import MAX_DEATHS, PoisonList, Suspects, digest_of
from penstock.protocol.transport.heartbeat import DeathReports
from penstock.protocol.transport.process import Identity
from penstock.services.gateway.queries import Work
from penstock.services.gateway.request import WorkRequest

# fields that do not change what a process has to do for a request
IGNORED_FIELDS = {"seed", "request_id", "stream", "timeout", "priority", "client"}
IGNORED_FIELDS |= {"output_token_ids"}


class TokenizerPoison:
    """Requests at which tokenizers died, by digest: suspects, and poison requests.

    When a tokenizer dies, any of its work may have killed it. Such suspects get a tokenizer for
    themselves, until it has done them: work that is alone at MAX_DEATHS deaths is given up.
    """

    def __init__(self, reports: DeathReports) -> None:
        self._reports = reports
        self.known = PoisonList()  # empty until a tokenizer has died
        self.suspects: Suspects[Work] = Suspects()

    def num_deaths(self, message: WorkRequest) -> int:
        """Return at how many deaths of tokenizers the same request was their only work."""
        return self.known.num_deaths(digest(message))

    def is_poison(self, message: WorkRequest) -> bool:
        return self.num_deaths(message) >= MAX_DEATHS

    def suspect_if_known(self, work: Work) -> None:
        """Suspect new work if the same request was alone at a death."""
        if num_deaths := self.num_deaths(work.message):
            self.suspects[work] = num_deaths

    def keeps_apart(self, work: Work, others: list[Work]) -> bool:
        """Return whether `work`, or a tokenizer's only other work, is a suspect."""
        return work in self.suspects or (len(others) == 1 and others[0] in self.suspects)

    def blame(self, tokenizer: bytes, lost: list[Work]) -> Work | None:
        """Suspect the work of a dead tokenizer, by routing id. Return the work that is poison."""
        dead = Identity.decode(tokenizer)
        self._reports.died([(dead.name, dead.pid)], [digest(work.message) for work in lost])
        self.suspects.add(lost)
        if len(lost) != 1:
            return None
        poison = self.suspects.blame(lost)
        self.known.put(digest(lost[0].message), self.suspects[lost[0]])
        return poison[0] if poison else None

    def clear(self, work: Work) -> None:
        """Clear work that a tokenizer has done, if it is a suspect, and equal requests."""
        if self.suspects.pop(work, None) is not None:
            self.known.put(digest(work.message), 0)
            self._reports.clear([digest(work.message)])

    def learn(self, digests: list[bytes]) -> None:
        """Refuse requests that an earlier gateway has given up, as the supervisor reports."""
        for poison in digests:
            self.known.put(poison, MAX_DEATHS)

    def give_up(self, message: WorkRequest) -> bytes:
        """Refuse a request from now on. Return its digest."""
        poison = digest(message)
        self.known.put(poison, MAX_DEATHS)
        self._reports.found(poison)
        return poison


def digest(message: WorkRequest) -> bytes:
    """Return equal bytes for equal requests, also of different clients."""
    fields = [field for field in message.__struct_fields__ if field not in IGNORED_FIELDS]
    return digest_of(type(message).__name__, [getattr(message, field) for field in fields])
