"""Poison requests at the gateway: one that is known is refused before anything works at it."""

from collections.abc import Iterable

from penstock.protocol.client import DetokenizeRequest, GenerateRequest, TokenizePromptRequest
from penstock.protocol.poison import REFUSED, DeathReports, PoisonList, digest_of
from penstock.services.gateway.admission import RefusedError
from penstock.services.gateway.ledger import Entry

Asked = GenerateRequest | TokenizePromptRequest | DetokenizeRequest
NOT_ASKED = {"seed", "request_id", "stream", "timeout", "output_token_ids", "priority"}
"""fields that do not change what a process has to do for a request"""
MAX_DEATHS = 2
"""of tokenizers that worked at a request and nothing else"""


class Poison:
    """Digests of requests that were given up, or are suspects."""

    def __init__(self, reports: DeathReports) -> None:
        self.reports = reports
        self._known = PoisonList()

    def check(self, request: Asked) -> None:
        """Raises RefusedError for a request that was given up."""
        if len(self._known) and self._known.num_deaths(digest(request)) >= MAX_DEATHS:
            raise RefusedError(REFUSED, code="failed")

    def found(self, request: Asked, entries: Iterable[Entry]) -> list[Entry]:
        """A request is given up. Return those of these entries that ask for the same in vain."""
        poison = digest(request)
        self._known.put(poison, MAX_DEATHS)
        return [one for one in entries if not one.token_ids and digest(one.request) == poison]


def digest(request: Asked) -> bytes:
    """Return what is equal for requests that ask for the same, whoever asks."""
    fields = [field for field in request.__struct_fields__ if field not in NOT_ASKED]
    return digest_of(type(request).__name__, [getattr(request, field) for field in fields])
