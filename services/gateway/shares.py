"""What each client has open, so that none takes the places of all others. No I/O."""

from itertools import count
from weakref import WeakValueDictionary

RESERVED = 8
"""One more place for every N that a limit has is kept for clients that have few."""


class Share:
    """One client: a connection, or over HTTP an address; and what it has open."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_open = 0
        """requests and questions that are not answered"""
        self.num_waiting_tokens = 0
        """of prompts of which nothing has come out"""
        self.num_bytes = 0


class Shares:
    """The shares of all clients that are connected or have something open."""

    def __init__(self) -> None:
        self._by_name: WeakValueDictionary[str, Share] = WeakValueDictionary()
        self._numbers = count(1)

    def of_connection(self) -> Share:
        """Makes the share of a connection: nobody else has its name."""
        return Share(f"connection {next(self._numbers)}")

    def named(self, name: str) -> Share:
        """Returns the share of a client that one of our HTTP servers names."""
        share = self._by_name.get(name)
        if share is None:
            share = self._by_name[name] = Share(name)
        return share


def is_too_much(new: int, own: int, total: int, limit: int) -> bool:
    """Return whether a client that has `own` of `total` things may not have `new` ones more.

    Up to the limit a client may have any number. Beyond it there are a few more, of which a client
    may have as many as it leaves free: so whoever has filled the limit gets none of them.
    """
    free = limit + -(-limit // RESERVED) - total
    return total + new > limit and not (own < free >= new)
