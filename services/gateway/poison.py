"""Poison requests at the gateway: one that is known is refused before anything works at it."""

from collections.abc import Iterable

from penstock.protocol.messages.client import (
    DetokenizeRequest,
    GenerateRequest,
    TokenizePromptRequest,
)
from penstock.protocol.poison import REFUSED, DeathReports, PoisonList, digest_of
from penstock.protocol.transport.process import Identity
from penstock.services.gateway.entry import Entry
from penstock.services.gateway.validation import RefusedError

Asked = GenerateRequest | TokenizePromptRequest | DetokenizeRequest
NOT_ASKED = {"seed", "request_id", "stream", "timeout", "output_token_ids", "priority", "client"}
"""fields that do not change what a process has to do for a request"""
MAX_DEATHS = 2
"""of tokenizers that worked at a request and nothing else"""
GIVEN_UP = f"{MAX_DEATHS} tokenizers died while they worked at the request; it is not tried again"


class Poison:
    """Digests of requests that were given up, or are suspects."""

    def __init__(self, reports: DeathReports) -> None:
        self._reports = reports
        self._known = PoisonList()

    def num_deaths(self, request: Asked) -> int:
        """Return at how many deaths of tokenizers the same request was the only one."""
        return self._known.num_deaths(digest(request)) if len(self._known) else 0

    def died(self, tokenizer: bytes, requests: list[Asked]) -> None:
        """A tokenizer died, by its routing id, that had these requests."""
        dead = Identity.decode(tokenizer)
        self._reports.died([(dead.name, dead.pid)], [digest(request) for request in requests])

    def suspect(self, request: Asked, num_deaths: int) -> None:
        """A request was the only one at this many deaths; at none any more if that is 0."""
        self._known.put(digest(request), num_deaths)

    def check(self, request: Asked) -> None:
        """Raises RefusedError for a request that was given up."""
        if self.num_deaths(request) >= MAX_DEATHS:
            raise RefusedError(REFUSED, code="failed")

    def found(self, request: Asked, entries: Iterable[Entry]) -> list[Entry]:
        """A request is given up. Return those of these entries that ask for the same in vain."""
        poison = digest(request)
        self._known.put(poison, MAX_DEATHS)
        self._reports.found(poison)
        return [one for one in entries if not one.token_ids and digest(one.request) == poison]


def digest(request: Asked) -> bytes:
    """Return what is equal for requests that ask for the same, whoever asks."""
    fields = [field for field in request.__struct_fields__ if field not in NOT_ASKED]
    return digest_of(type(request).__name__, [getattr(request, field) for field in fields])
