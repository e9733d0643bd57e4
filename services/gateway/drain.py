"""The end of a pipeline: what is open is finished, and nothing else accepted."""

from penstock.protocol.messages.client import GenerateRequest
from penstock.services.gateway.router import Replicas
from penstock.services.gateway.tokenizer_queries import AskedTokenizer
from penstock.services.gateway.validation import RefusedError


class Drain:
    """Whether the pipeline is about to stop, and who may ask nevertheless.

    A gateway that was restarted meanwhile knows no request. Its clients ask again for what runs
    (by its id, under a lease of the scheduler), or for the rest of an answer.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.is_on = False
        self._replicas = replicas

    def check(self, request: GenerateRequest | AskedTokenizer) -> None:
        """Raises RefusedError for a new request."""
        if not self.is_on:
            return
        if isinstance(request, GenerateRequest):
            known = request.request_id and self._replicas.may_have(request.request_id)
            if known or request.output_token_ids:
                return
        raise RefusedError("the pipeline stops and takes no more requests", code="overloaded")
