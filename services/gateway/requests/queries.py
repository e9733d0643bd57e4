"""Queries: requests that a tokenizer answers alone."""

from collections.abc import Iterator
from itertools import count

import msgspec

from penstock.protocol.messages.client import MSGPACK, TokenizePromptRequest
from penstock.protocol.messages.pipeline import TokenizerQuery, TokenizerReply
from penstock.services.gateway.client import Client, Totals
from penstock.services.gateway.clients.client_socket import ClientSocket
from penstock.services.gateway.entry import Entry, estimated_tokens
from penstock.services.gateway.validation import TokenizerRequest

_decode = msgspec.msgpack.Decoder(TokenizerRequest).decode


class Query:
    """One request that a tokenizer answers alone: token ids of a prompt, or text of token ids."""

    def __init__(
        self, number: int, client: Client, request: TokenizerRequest, num_bytes: int
    ) -> None:
        self.key = number
        self.client = client
        self.size = num_bytes
        self.share, self.turn = client.share, client.turn
        self.priority = 0
        self.num_tokens = num_query_tokens(request)
        self.frame = MSGPACK.encode(request)  # its lists may be 70 times as large

    @property
    def request(self) -> TokenizerRequest:
        """Return the request, decoded from its bytes."""
        request: TokenizerRequest = _decode(self.frame)
        return request

    @property
    def is_open(self) -> bool:
        return not self.client.connection.is_closed

    def submission(self) -> TokenizerQuery:
        return TokenizerQuery(self.key, self.request)


Work = Entry | Query  # of a tokenizer


def num_query_tokens(request: TokenizerRequest) -> int:
    """Return the estimated length of the prompt that is to be tokenized."""
    return estimated_tokens(request) if isinstance(request, TokenizePromptRequest) else 0


class Queries:
    """All open queries by number, which is unique: an earlier gateway's answer may arrive."""

    def __init__(self, first_number: int, clients: ClientSocket, totals: Totals) -> None:
        self._numbers = count(first_number)
        self._open: dict[int, Query] = {}
        self._clients = clients
        self._totals = totals

    def __len__(self) -> int:
        return len(self._open)

    def open(self, client: Client, request: TokenizerRequest, num_bytes: int) -> Query:
        """Return a new query, of a frame of `num_bytes`."""
        query = Query(next(self._numbers), client, request, num_bytes)
        self._open[query.key] = query
        self._totals.count(query.share, 1, query.num_tokens, query.size)
        return query

    def answer(self, message: TokenizerReply) -> None:
        """Send a tokenizer's reply to the client; the second one of a query is dropped."""
        if query := self._remove(message.number):
            self._clients.reply(query.client, message.reply)

    def take_closed(self) -> Iterator[Query]:
        """Remove and yield queries whose client has disconnected."""
        for query in [one for one in self._open.values() if not one.is_open]:
            self._remove(query.key)
            yield query

    def _remove(self, number: int) -> Query | None:
        query = self._open.pop(number, None)
        if query:
            self._totals.count(query.share, -1, -query.num_tokens, -query.size)
        return query
