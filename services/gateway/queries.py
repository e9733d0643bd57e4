"""Queries: requests that are answered by a tokenizer, without a scheduler."""

from itertools import count

import msgspec

from penstock.protocol.messages.client import MSGPACK
from penstock.protocol.messages.pipeline import TokenizerQuery
from penstock.services.gateway.request import (
    Client,
    Request,
    Share,
    TokenizerRequest,
    estimated_tokens,
)

_decode = msgspec.msgpack.Decoder(TokenizerRequest).decode


class Query:
    """A request for the token ids of a prompt, or for the text of token ids."""

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
