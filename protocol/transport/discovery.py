"""Discovery in a cluster: how processes on several machines find each other.

A process that binds a socket binds an `ipc://` file for its own machine and `tcp://` with CURVE for
the others, and announces both to the directory, which the supervisor keeps. A process that connects
follows the directory: to the file on its own machine, to `tcp://` otherwise, and to the new address
when the name moves. All processes share one pair of server keys and one pair of client keys, which
the supervisor makes for each run and distributes.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
from msgspec import Struct

from penstock.protocol.transport.channel import HEARTBEAT_INTERVAL, MAX_MISSED_HEARTBEATS, Channel
from penstock.protocol.transport.context import (
    CLUSTER,
    Context,
    drain,
    host_and_port,
    secure_client,
    secure_server,
)

KEYS_FOLDER = "cluster-keys"  # subfolder with keys in the form of `launch keys`
KEYS_CLIENT = "process"  # name of the client whose key all processes share
ZAP_DOMAIN = b"cluster"
# milliseconds after which a connection is tried again, because TCP's own intervals grow
CONNECT_TIMEOUT = 2000


class Node(Struct, frozen=True):
    """A machine of a cluster, described for the processes that start there."""

    node_id: str  # the cluster's id of the machine
    name: str  # readable name of the machine
    host: str  # address at which other machines reach this machine
    # name → `tcp://` address of the supervisor's sockets: `directory` and `supervisor`
    fixed: dict[str, str]


class Address(Struct, frozen=True):
    """The endpoints to which a name is bound."""

    node_id: str
    ipc: str
    tcp: str
    incarnation: int  # incarnation of the binding process; a later incarnation replaces it


class Announcement(Struct, tag=True):
    """Process → directory, on each connection: the names that the process binds."""

    addresses: dict[str, Address]


class Directory(Struct, tag=True):
    """Directory → process, on each announcement and each change: every name's address."""

    addresses: dict[str, Address]

    def add(self, announcement: Announcement) -> bool:
        """Add newer addresses. Return False if no address is newer."""
        newer = {
            name: address
            for name, address in announcement.addresses.items()
            if name not in self.addresses or address.incarnation > self.addresses[name].incarnation
        }
        self.addresses |= newer
        return bool(newer)


class _Following:
    """A socket that is connected to a name."""

    def __init__(self, socket: "zmq.Socket[bytes]", name: str) -> None:
        self.socket = socket
        self.name = name
        self.endpoint = ""  # current endpoint; empty: not connected
        self.num_handshakes = 0  # number of handshakes at this endpoint
        self.on_connected: Callable[[], None] = lambda: None
        self.on_reconnect = self._exit

    def point_to(self, endpoint: str) -> None:
        """Connect the socket to this endpoint only."""
        if endpoint == self.endpoint:
            return
        if self.endpoint:
            self.socket.disconnect(self.endpoint)
        self.endpoint, self.num_handshakes = endpoint, 0
        self.socket.connect(endpoint)

    def connected(self, endpoint: str) -> None:
        """Handle a handshake. On this machine, a second handshake shows a restarted process."""
        if endpoint != self.endpoint:
            return
        self.num_handshakes += 1
        if self.num_handshakes > 1 and not endpoint.startswith("ipc:"):
            self.on_reconnect()
        self.on_connected()

    def _exit(self) -> None:
        raise SystemExit(f"lost the connection to {self.name}, and perhaps messages: restarting")


class Cluster(Context):
    """The sockets of a process of a cluster, for one thread (except `Node.fixed` names)."""

    node: Node
    _folder: Path
    _directory: Channel[Any]
    _bound: dict[str, Address]
    _known: dict[str, Address]
    _followings: dict[Any, _Following]  # by socket
    _incarnation: int

    def __init__(self, node: Node, folder: Path, incarnation: int = 0) -> None:
        """Connect to the directory. folder: the pipeline's, with its keys. Raises KeysError."""
        super().__init__(node.node_id, node.host)
        self.node, self._folder = node, folder
        self._bound, self._known, self._followings = {}, {}, {}
        self._incarnation = incarnation
        self._directory = self.connect(zmq.DEALER, f"{CLUSTER}directory", Directory)
        self.handlers.append((self._directory, self._on_directory))
        self.on_handshake(self._directory.socket, lambda _: self._announce())
        self._announce()  # the socket may be connected already, before the monitor
        self.admit(ZAP_DOMAIN, folder / KEYS_FOLDER)

    def bind_socket(self, socket: "zmq.Socket[bytes]", endpoint: str) -> None:
        name = endpoint.removeprefix(CLUSTER)
        if name == endpoint:
            super().bind_socket(socket, endpoint)
            return
        ipc = f"ipc://{self._folder}/{name}"
        socket.bind(ipc)  # not encrypted: the folder's mode keeps other users out
        tcp = bind_tcp(socket, self.host, self._folder)
        self._bound[name] = Address(self.node_id, ipc, tcp, self._incarnation)
        self._announce()

    def connect_socket(self, socket: "zmq.Socket[bytes]", endpoint: str, wait: bool = True) -> None:
        name = endpoint.removeprefix(CLUSTER)
        if name == endpoint:
            super().connect_socket(socket, endpoint)
            return
        socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT)
        if name in self.node.fixed:
            self._secure(socket)
            socket.connect(self.node.fixed[name])
            return
        following = self._followings[socket] = _Following(socket, name)
        if wait:
            self.on_handshake(socket, following.connected)
        self._point(following)
        while wait and not following.endpoint:
            handlers = self.handlers[:2]  # the directory and its monitor
            zmq.select([channel.socket for channel, _ in handlers], [], [])
            drain(handlers)

    def on_connected(self, channel: Channel[Any], handler: Callable[[], None]) -> None:
        self._followings[channel.socket].on_connected = handler

    def on_reconnect(self, channel: Channel[Any], handler: Callable[[], None]) -> None:
        self._followings[channel.socket].on_reconnect = handler

    def _announce(self) -> None:
        self._directory.send(Announcement(self._bound))

    def _on_directory(self) -> None:
        for _, directory in self._directory.receive():
            self._known = directory.addresses
            for socket, following in list(self._followings.items()):
                if socket.closed:  # the client is closed
                    del self._followings[socket]
                else:
                    self._point(following)

    def _point(self, following: _Following) -> None:
        address = self._known.get(following.name)
        if address is None:
            return
        if address.node_id == self.node_id and following.socket.mechanism == zmq.NULL:
            following.point_to(address.ipc)
        else:  # also after a move to this machine: a socket that has keys can't drop them
            if following.endpoint != address.tcp:
                self._secure(following.socket)
            following.point_to(address.tcp)

    def _secure(self, socket: "zmq.Socket[bytes]") -> None:
        secure_client(socket, self._folder / KEYS_FOLDER, KEYS_CLIENT)
        over_tcp(socket, self.host)


def bind_tcp(socket: "zmq.Socket[bytes]", host: str, folder: Path) -> str:
    """Bind a socket at a free port of `host`, with CURVE. Return its `tcp://` address."""
    secure_server(socket, folder / KEYS_FOLDER, ZAP_DOMAIN)
    over_tcp(socket, host)
    socket.bind(f"tcp://{host_and_port(host, '*')}")
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def over_tcp(socket: "zmq.Socket[bytes]", host: str) -> None:
    """Make a socket disconnect silent peers."""
    socket.setsockopt(zmq.IPV6, ":" in host)
    socket.setsockopt(zmq.HEARTBEAT_IVL, round(1000 * HEARTBEAT_INTERVAL))
    socket.setsockopt(
        zmq.HEARTBEAT_TIMEOUT, round(1000 * HEARTBEAT_INTERVAL * MAX_MISSED_HEARTBEATS)
    )
