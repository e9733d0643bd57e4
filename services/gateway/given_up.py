"""Requests that are given up as poison, and the others that ask for the same."""

from penstock.protocol.messages.client import ErrorReply
from penstock.protocol.messages.tokenizer import RequestFailed
from penstock.protocol.poison import REFUSED
from penstock.services.gateway.entry import Entry
from penstock.services.gateway.poison import GIVEN_UP, Asked, Poison
from penstock.services.gateway.requests import Requests
from penstock.services.gateway.router import Replicas
from penstock.services.gateway.tokenizer_queries import OpenQuestion, Questions


class GivenUp:
    """Answers them with `failed`."""

    def __init__(
        self, poison: Poison, requests: Requests, questions: Questions, replicas: Replicas
    ) -> None:
        self._poison = poison
        self._requests = requests
        self._questions = questions
        self._replicas = replicas

    def on_failed(self, entry: Entry, message: RequestFailed) -> None:
        """A scheduler can't serve a request, and is not to get another one like it if it is
        poison."""
        self._requests.fail(entry, message.error)
        if message.is_poison:
            self._refuse(entry.request)

    def on_poison(self, work: Entry | OpenQuestion) -> None:
        """Tokenizers died of this work."""
        if isinstance(work, OpenQuestion):
            self._questions.fail(work, GIVEN_UP)
        elif work.is_open:
            self._requests.fail(work, ErrorReply(code="failed", message=GIVEN_UP))
        self._refuse(work.request)

    def _refuse(self, request: Asked) -> None:
        for same in self._poison.found(request, self._replicas.all_entries):
            self._requests.fail(same, ErrorReply(code="failed", message=REFUSED))
