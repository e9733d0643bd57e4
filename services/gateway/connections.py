"""The clients' connections, and which requests are answered on them."""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from penstock.protocol.messages.client import Codec
from penstock.protocol.transport.channel import MAX_MISSED_HEARTBEATS
from penstock.services.gateway.shares import Share, Shares
from penstock.services.gateway.validation import RefusedError
from penstock.services.gateway.wire import is_all_read, tcp_counters


class Connection:
    """One connection of a client, and what its full queue keeps from it."""

    def __init__(self, fd: int = -1, share: Share | None = None, is_inner: bool = False) -> None:
        """fd: libzmq's file descriptor. is_inner: it is of a process of the pipeline, which may
        name its clients."""
        self.fd = fd
        self.share = share or Share("")
        self.is_inner = is_inner
        self.host = ""
        """address of the client's machine; empty within this one"""
        self.is_gone = False
        """nothing is sent on it any more: it is closed, or was cut off"""
        self.was_cut_off = False
        """what still comes on it is dropped"""
        self.request_ids: set[str] = set()
        self.unsent: dict[str, None] = {}
        """requests with news that wait until the queue has room, oldest first"""
        self.replies: deque[list[bytes]] = deque()
        """frames of replies to anything else"""
        self.num_status_queries = 0
        """that wait"""
        self.retry_at = 0.0
        self.num_messages = 0
        """received"""
        self._num_messages_before = 0
        self._num_received_last = self._num_quiet_heartbeats = 0
        self._num_received_before = 0
        """bytes, when the last message had come"""
        self.num_given = 0
        """bytes of messages that libzmq was given to send, at least"""
        self.num_read = 0
        """of them, bytes that the client has read, when that was looked at last"""
        self._num_read_before = 0
        self.largest = 0
        """bytes of the largest message given"""

    @property
    def is_full(self) -> bool:
        """Something waits: nothing else may overtake it."""
        return bool(self.unsent or self.replies)

    @property
    def num_queued(self) -> int:
        """Bytes that libzmq and the kernel have for the client, or had when it was looked."""
        return self.num_given - self.num_read

    def gave(self, num_bytes: int) -> None:
        """libzmq was given a message."""
        self.num_given += num_bytes
        if num_bytes > self.largest:
            self.largest = num_bytes

    def take_progress(self) -> int:
        """Bytes that were read since the last call."""
        before, self._num_read_before = self._num_read_before, self.num_read
        return self.num_read - before

    def num_unfinished(self, num_received: int) -> int:
        """Bytes that have come since the last message, of all that have come (at most)."""
        if self._num_messages_before != self.num_messages:
            self._num_messages_before = self.num_messages
            self._num_received_before = num_received
        return num_received - self._num_received_before

    def is_ignored(self, num_received: int, max_handshake_bytes: int) -> bool:
        """Whether more than a handshake has come, nothing for a while, and no message of it: libzmq
        ignores a client whose identity another one has. To be called every heartbeat."""
        if self.num_messages or num_received <= max_handshake_bytes:
            return False
        if num_received > self._num_received_last:
            self._num_received_last, self._num_quiet_heartbeats = num_received, 0
        self._num_quiet_heartbeats += 1
        return self._num_quiet_heartbeats > MAX_MISSED_HEARTBEATS

    def look(self) -> None:
        """Finds out how much of what was given has been read. Of a connection that is not TCP the
        kernel knows only whether all of it was."""
        counters = tcp_counters(self.fd)
        if counters:
            self.num_read = max(self.num_read, counters.acked)
            self.num_given = max(self.num_given, self.num_read)  # libzmq sends more than messages
        elif is_all_read(self.fd):
            self.num_read = self.num_given


class Client(NamedTuple):
    """Where an answer goes, and in which encoding."""

    envelope: tuple[bytes, ...]
    """the frames before the message: identity, and an empty one for a REQ socket"""
    codec: Codec
    connection: Connection
    named: Share | None = None
    """of the client that one of our HTTP servers asks for"""

    @property
    def share(self) -> Share:
        """What this client has open."""
        return self.named or self.connection.share


class Connections:
    """All connections by their file descriptor, and the requests that have lost theirs.

    A descriptor names a connection from the event that it was accepted until the event that it was
    closed; then the system gives the same number to another one. So whoever looks one up must have
    told of the events before.
    """

    def __init__(self) -> None:
        self.shares = Shares()
        self._by_fd: dict[int, Connection] = {}
        self._nobody = Connection()
        self._nobody.is_gone = True
        self._lost: set[str] = set()
        self._lost_before: set[str] = set()

    def __len__(self) -> int:
        return len(self._by_fd)

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._by_fd.values()))

    def accepted(self, fd: int, is_inner: bool = False) -> Connection:
        """A client has connected."""
        connection = self._by_fd[fd] = Connection(fd, self.shares.of_connection(), is_inner)
        return connection

    def closed(self, fd: int) -> Connection | None:
        """A connection is no more; its requests may be asked for on another one."""
        connection = self._by_fd.pop(fd, None)
        if connection:
            self.leave(connection)
        return connection

    def leave(self, connection: Connection) -> None:
        """Nothing is sent on a connection any more."""
        connection.is_gone = True
        connection.unsent.clear()
        connection.replies.clear()
        self._lost |= connection.request_ids

    def of(self, fd: int) -> Connection:
        """The connection that a message came on; one that is gone, if it is closed by now."""
        return self._by_fd.get(fd, self._nobody)

    def named(self, client: Client, name: str | None) -> Client:
        """The client that a request names. Raises RefusedError where it may name none."""
        if name is None:
            return client
        if not client.connection.is_inner:
            raise RefusedError(
                f"client: got {name!r}, expected no such field: only the HTTP servers of the "
                "pipeline name their clients; leave it out",
                "client",
            )
        return client._replace(named=self.shares.named(name))

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
