"""Poison requests: requests at which tokenizers died, and which are refused from then on."""

from penstock.protocol.poison import REFUSED, PoisonList, digest_of
from penstock.protocol.transport.death_reports import DeathReports
from penstock.protocol.transport.process import Identity
from penstock.services.gateway.validation import RefusedError, WorkRequest

IGNORED_FIELDS = {"seed", "request_id", "stream", "timeout", "priority", "client"}
IGNORED_FIELDS |= {"output_token_ids"}
"""fields that do not change what a process has to do for a request"""
MAX_DEATHS = 2
"""of tokenizers that worked at a request and nothing else"""
GIVEN_UP = f"{MAX_DEATHS} tokenizers died while they worked at the request; it is not tried again"


class Poison:
    """Digests of requests that were given up, or are suspects."""

    def __init__(self, reports: DeathReports) -> None:
        self._reports = reports
        self.known = PoisonList()
        """empty until a tokenizer has died"""

    def num_deaths(self, request: WorkRequest) -> int:
        """Return at how many deaths of tokenizers the same request was the only one."""
        return self.known.num_deaths(digest(request))

    def report_death(self, tokenizer: bytes, requests: list[WorkRequest]) -> None:
        """Report the death of a tokenizer, by its routing id, that had these requests."""
        dead = Identity.decode(tokenizer)
        self._reports.died([(dead.name, dead.pid)], [digest(request) for request in requests])

    def set_num_deaths(self, request: WorkRequest, num_deaths: int) -> None:
        """Remember at how many deaths a request was the only one."""
        self.known.put(digest(request), num_deaths)

    def clear(self, request: WorkRequest) -> None:
        """Forget the deaths of a request, which a tokenizer has processed since."""
        self.set_num_deaths(request, 0)
        self._reports.clear([digest(request)])

    def learn(self, digests: list[bytes]) -> None:
        """Refuse requests that an earlier gateway has given up, as the supervisor reports."""
        for one in digests:
            self.known.put(one, MAX_DEATHS)

    def check(self, request: WorkRequest) -> None:
        if self.num_deaths(request) >= MAX_DEATHS:
            raise RefusedError(REFUSED, code="failed")

    def give_up(self, request: WorkRequest) -> bytes:
        """Refuse a request from now on. Return its digest."""
        poison = digest(request)
        self.known.put(poison, MAX_DEATHS)
        self._reports.found(poison)
        return poison


def digest(request: WorkRequest) -> bytes:
    """Return equal bytes for equal requests, of whichever client."""
    fields = [field for field in request.__struct_fields__ if field not in IGNORED_FIELDS]
    return digest_of(type(request).__name__, [getattr(request, field) for field in fields])
