"""Clients: the open work of each, its connection, and the sender of a request."""

from collections import deque
from typing import NamedTuple

from penstock.protocol.messages.client import Codec


class Share:
    """Open work of one client: a key, an address, or a process on this machine."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_open = 0  # requests and tokenizer queries that are not answered
        self.num_waiting_tokens = 0  # prompt tokens of requests that have no output yet
        self.num_bytes = 0


class Totals(Share):
    """Open work of all clients for the model `name`. `Ledger` and `Queries` count it."""

    def __init__(self, name: str = "") -> None:
        super().__init__(name)
        self.num_waiting = 0  # requests without output
        self.num_started = 0  # requests that have had their first token since the gateway's start

    def count(
        self, share: Share, num_open: int = 0, num_tokens: int = 0, num_bytes: int = 0
    ) -> None:
        """Add work, or remove it where a number is negative, of one client and in total."""
        for one in (share, self):
            one.num_open += num_open
            one.num_waiting_tokens += num_tokens
            one.num_bytes += num_bytes


class Connection:
    """One connection of a client, and what waits to be sent on it.

    `Connections` opens and closes it. `ClientSocket` counts its messages and bytes, with
    `client_watch`. `ClientSocket` and `PipelineStatus` write what waits on it.
    """

    def __init__(
        self,
        fd: int = -1,
        share: Share | None = None,
        is_inner: bool = False,
        is_closed: bool = False,
    ) -> None:
        """fd: libzmq's descriptor. is_inner: of a process of the pipeline; it names its clients."""
        self.fd = fd
        self.number = 0
        self.is_inner = is_inner
        self.num_messages = 0  # received
        # bytes that libzmq and the kernel have for the client; updated by `update_num_read`
        self.num_queued = 0
        # bytes that the client had read at the last `update_num_read`, and `take_progress`
        self.num_read = self.num_read_before = 0
        self.largest = 0  # bytes of the largest message sent
        self.share = share or Share("")
        self.host = ""  # address of the client's machine; empty within this machine
        self.is_closed = is_closed  # by the client or the gateway: nothing is sent on it any more
        self.is_cut_off = False
        self.is_refused = False  # True if the connection is beyond a limit, and no longer counted
        # ids of requests with output that waits until the queue has room, oldest first
        self.unsent: dict[str, None] = {}
        self.replies: deque[list[bytes]] = deque()  # waiting frames of replies to other requests
        self.num_status_queries = 0
        self.retry_at = 0.0
        # ZeroMQ identity, known from the first message; libzmq's own ones begin with a zero
        self.identity = b""

    @property
    def is_full(self) -> bool:
        return bool(self.unsent or self.replies)


class Client(NamedTuple):
    """The sender of a request: the way back to it, its encoding, and its share."""

    # the frames before the message: identity, and an empty frame for a REQ socket
    envelope: tuple[bytes, ...]
    codec: Codec
    connection: Connection
    share: Share  # of the client that an HTTP server names, otherwise of the connection
    turn: str = ""  # name in a `FairQueue`: the connections of one client take turns
