"""Messages of clients, each given to what handles its kind."""

from penstock.protocol.messages.client import (
    AbortReply,
    AbortRequest,
    DetokenizeRequest,
    GenerateRequest,
    Request,
    StatusRequest,
    TokenizePromptRequest,
)
from penstock.services.gateway.connections import Client
from penstock.services.gateway.delivery import Outbox
from penstock.services.gateway.incoming import Incoming
from penstock.services.gateway.poison import Poison
from penstock.services.gateway.requests import Requests
from penstock.services.gateway.status_queries import StatusQueries
from penstock.services.gateway.validation import RefusedError


class Dispatch:
    """Decodes what comes in; whatever is wrong with it is reported to its sender alone."""

    def __init__(
        self,
        incoming: Incoming,
        requests: Requests,
        outbox: Outbox,
        status_queries: StatusQueries,
        poison: Poison,
    ) -> None:
        self._incoming = incoming
        self._requests = requests
        self._outbox = outbox
        self._status_queries = status_queries
        self._poison = poison

    def handle(self, is_ready: bool) -> None:
        """Everything that waits; `is_ready`: the pipeline is."""
        for client, frame in self._incoming.receive():
            try:
                request = self._requests.decode(client.codec, frame)
                client = self._incoming.connections.named(client, getattr(request, "client", None))
                self._on_request(client, request, len(frame), is_ready)
            except RefusedError as error:
                self._requests.statistics.failed(error.reply)
                self._outbox.reply(client, error.reply)

    def _on_request(self, client: Client, request: Request, num_bytes: int, is_ready: bool) -> None:
        """One request, of a frame of `num_bytes`. Raises RefusedError."""
        match request:
            case GenerateRequest():
                self._poison.check(request)
                self._requests.ask(client, request, num_bytes)
            case TokenizePromptRequest() | DetokenizeRequest():
                self._poison.check(request)
                self._requests.ask_tokenizer(client, request, num_bytes)
            case AbortRequest():
                found = self._requests.abort(request.request_id)
                self._outbox.reply(client, AbortReply(request_id=request.request_id, found=found))
            case StatusRequest():
                self._status_queries.ask(client, request, is_ready)
