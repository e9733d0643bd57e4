"""The clients' connections, and which requests are answered on them."""

from collections import deque
from typing import NamedTuple

from penstock.protocol.client import Codec


class Connection:
    """One connection of a client, and what its full queue keeps from it."""

    def __init__(self) -> None:
        self.is_gone = False
        self.request_ids: set[str] = set()
        self.unsent: dict[str, None] = {}
        """requests with news that wait until the queue has room, oldest first"""
        self.replies: deque[list[bytes]] = deque()
        """frames of replies to anything else"""
        self.num_status_queries = 0
        """that wait"""
        self.retry_at = 0.0
        self.was_cut_off = False

    @property
    def is_full(self) -> bool:
        """Something waits: nothing else may overtake it."""
        return bool(self.unsent or self.replies)


class Client(NamedTuple):
    """Where an answer goes, and in which encoding."""

    envelope: tuple[bytes, ...]
    """the frames before the message: identity, and an empty one for a REQ socket"""
    codec: Codec
    connection: Connection


class Connections:
    """All connections by their file descriptor, and the requests that have lost theirs.

    A descriptor names a connection from the event that it was accepted until the event that it was
    closed; then the system gives the same number to another one. So whoever looks one up must have
    told of the events before.
    """

    def __init__(self) -> None:
        self._by_fd: dict[int, Connection] = {}
        self._nobody = Connection()
        self._nobody.is_gone = True
        self._lost: set[str] = set()
        self._lost_before: set[str] = set()

    def __len__(self) -> int:
        return len(self._by_fd)

    def accepted(self, fd: int) -> None:
        """A client has connected."""
        self._by_fd[fd] = Connection()

    def closed(self, fd: int) -> None:
        """A connection is no more; its requests may be asked for on another one."""
        if connection := self._by_fd.pop(fd, None):
            connection.is_gone = True
            connection.unsent.clear()
            connection.replies.clear()
            self._lost |= connection.request_ids

    def of(self, fd: int) -> Connection:
        """The connection that a message came on; one that is gone, if it is closed by now."""
        return self._by_fd.get(fd, self._nobody)

    def full(self) -> list[Connection]:
        """Those for which something waits."""
        return [one for one in self._by_fd.values() if one.is_full]

    def add(self, request_id: str, client: Client) -> None:
        """The request is answered to this client."""
        if client.connection.is_gone:
            self._lost.add(request_id)
        else:
            client.connection.request_ids.add(request_id)

    def remove(self, request_id: str, client: Client) -> None:
        """It is not any more."""
        client.connection.request_ids.discard(request_id)
        client.connection.unsent.pop(request_id, None)
        self._lost.discard(request_id)
        self._lost_before.discard(request_id)

    def lose(self, request_id: str, client: Client) -> Client:
        """The client can't be reached, whatever the events say: the one that stands for it now."""
        self.remove(request_id, client)
        self._lost.add(request_id)
        return client._replace(connection=self._nobody)

    def take_lost(self) -> set[str]:
        """The requests that lost their connection before the last call, and got no other one."""
        lost, self._lost_before, self._lost = self._lost_before, self._lost, set()
        return lost
