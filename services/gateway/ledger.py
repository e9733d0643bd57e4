"""The ledger: all open requests and queries, with their counts in the totals of models. No I/O."""

from itertools import count

import msgspec

from penstock.protocol.messages.client import MSGPACK, ErrorReply, GenerateReply
from penstock.protocol.messages.pipeline import TokenizerQuery
from penstock.services.gateway.request import (
    Client,
    Connection,
    Request,
    Share,
    TokenizerRequest,
    estimated_tokens,
)

_decode = msgspec.msgpack.Decoder(TokenizerRequest).decode


class Ledger:
    """All requests by id, until the client has the answer.

    Attempt numbers are unique across requests and gateways.
    """

    def __init__(self, first_attempt: int = 0) -> None:
        self.first_attempt = first_attempt
        self._attempts = count(first_attempt)
        self._requests: dict[str, Request] = {}
        self._lost: dict[Request, Connection] = {}  # connections closed at the last `take_lost`

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_open(self) -> int:
        return sum(request.is_open for request in self._requests.values())

    def num_of_model(self, totals: Share) -> int:
        """Return the number of requests, open or answered, of the model with these totals."""
        return sum(request.totals is totals for request in self._requests.values())

    def get(self, request_id: str) -> Request | None:
        """Return the open request with this id, if any."""
        request = self._requests.get(request_id)
        return request if request and request.is_open else None

    def find(self, request_id: str) -> Request | None:
        """Return the request with this id, open or with an undelivered answer, if any."""
        return self._requests.get(request_id)

    def open(self, request: Request, totals: Share) -> None:
        request.totals = totals
        self.begin_attempt(request)
        self._requests[request.request_id] = request
        request.totals.num_waiting += 1
        request.totals.count(request.share, 1, request.num_waiting_tokens, request.num_bytes)

    def record_tokenized(self, request: Request, num_prompt_tokens: int, tokenizer: bytes) -> None:
        """Record that a tokenizer has sent the prompt to a scheduler."""
        request.num_prompt_tokens, request.tokenizer = num_prompt_tokens, tokenizer
        if request.num_waiting_tokens:
            num_new = num_prompt_tokens - request.num_waiting_tokens
            request.totals.count(request.share, num_tokens=num_new)
            request.num_waiting_tokens = num_prompt_tokens

    def record_growth(self, request: Request, num_bytes: int) -> None:
        """Count the new output of a request, whose size was `num_bytes` before it."""
        num_new = request.num_bytes - num_bytes
        request.totals.num_bytes += num_new
        request.share.num_bytes += num_new
        if request.num_waiting_tokens and num_new:
            self._stop_waiting(request)
            request.totals.num_started += 1

    def answer(self, request: Request, reply: GenerateReply | ErrorReply) -> None:
        """End a request, which stays in the ledger until its client has the reply."""
        request.answer = reply
        self._end(request)

    def remove(self, request: Request) -> None:
        self._end(request)
        if self._requests.pop(request.request_id, None):
            request.totals.count(request.share, num_bytes=-request.num_bytes)

    def begin_attempt(self, request: Request) -> None:
        """Begin a new attempt. Later output of earlier attempts is dropped."""
        request.attempt = next(self._attempts)
        request.num_attempts += 1
        request.tokenizer = b""

    def new_first_attempt(self) -> int:
        """Return an attempt number above all earlier attempts and below all later attempts."""
        return next(self._attempts)

    def passed_on_by(self, tokenizer: bytes) -> list[Request]:
        """Return open requests without output that this tokenizer has sent to a scheduler."""
        requests = (request for request in self._requests.values() if request.is_open)
        return [request for request in requests if request.tokenizer == tokenizer]

    def of_connection(self, connection: Connection) -> list[Request]:
        """Return the requests whose client has this connection."""
        requests = self._requests.values()
        return [request for request in requests if request.client.connection is connection]

    def take_lost(self) -> list[Request]:
        """Return requests whose connection was closed at the last call and is still the same."""
        before = self._lost
        connections = {request: request.client.connection for request in self._requests.values()}
        self._lost = {request: each for request, each in connections.items() if each.is_closed}
        return [request for request, each in self._lost.items() if before.get(request) is each]

    def _end(self, request: Request) -> None:
        self._stop_waiting(request)
        if request.is_open:
            request.is_open = False
            request.totals.count(request.share, num_open=-1)

    def _stop_waiting(self, request: Request) -> None:
        if request.num_waiting_tokens:
            request.totals.num_waiting -= 1
            request.totals.count(request.share, num_tokens=-request.num_waiting_tokens)
            request.num_waiting_tokens = 0


class Query:
    """A request for the token ids of a prompt, or for the text of token ids.

    A tokenizer answers it, without a scheduler.
    """

    priority = 0

    def __init__(
        self, number: int, client: Client, message: TokenizerRequest, num_bytes: int
    ) -> None:
        self.key = number
        self.client = client
        self.share, self.turn = client.share, client.turn
        self.size = num_bytes
        self.num_tokens = estimated_tokens(message)
        self.frame = MSGPACK.encode(message)

    @property
    def message(self) -> TokenizerRequest:
        """The client's message, decoded from its bytes."""
        message: TokenizerRequest = _decode(self.frame)
        return message

    @property
    def is_open(self) -> bool:
        return not self.client.connection.is_closed

    def submission(self) -> TokenizerQuery:
        return TokenizerQuery(self.key, self.message)


Work = Request | Query  # the work of a tokenizer


class Queries:
    """The open queries of a model by number.

    Numbers are unique across gateways, because a tokenizer may answer an earlier gateway's query.
    """

    def __init__(self, first_number: int, totals: Share) -> None:
        self._numbers = count(first_number)
        self._open: dict[int, Query] = {}
        self._totals = totals

    def __len__(self) -> int:
        return len(self._open)

    def open(self, client: Client, message: TokenizerRequest, num_bytes: int) -> Query:
        """Add and return a query, whose frame has `num_bytes`."""
        query = Query(next(self._numbers), client, message, num_bytes)
        self._open[query.key] = query
        self._totals.count(query.share, 1, query.num_tokens, query.size)
        return query

    def end(self, number: int) -> Query | None:
        """Remove and return a query; None if the query has already ended."""
        query = self._open.pop(number, None)
        if query:
            self._totals.count(query.share, -1, -query.num_tokens, -query.size)
        return query

    def take_closed(self) -> list[Query]:
        """Remove and return the queries whose clients have disconnected."""
        closed = [query for query in self._open.values() if not query.is_open]
        for query in closed:
            self.end(query.key)
        return closed
