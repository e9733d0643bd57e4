"""A pipeline on several machines: how its processes find each other, and who may speak to them.

Whoever binds a socket binds an `ipc://` file for its own machine, and `tcp://` with CURVE for the
others, and announces both to the directory, which the supervisor keeps. Whoever connects follows
the directory: to the file on its own machine, to `tcp://` else, and to a new address when the name
moves. All processes share one pair of server's and one pair of client's keys, which the supervisor
makes for each run and hands over.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
from msgspec import Struct
from zmq.utils.monitor import recv_monitor_message

from penstock.protocol.transport.authentication import Authenticator
from penstock.protocol.transport.channel import (
    CLUSTER,
    HEARTBEAT_INTERVAL,
    MAX_MISSED_HEARTBEATS,
    Channel,
    Network,
    connect,
)
from penstock.protocol.transport.curve import secure_client, secure_server
from penstock.protocol.transport.event_loop import drain

NODE_VARIABLE = "PENSTOCK_NODE"
"""names the file with the facts of the machine, a `Node` as JSON"""
KEYS_FOLDER = "cluster-keys"
"""beside that file, as `launch keys` makes it"""
KEYS_CLIENT = "process"
"""whose key all processes have"""
ZAP_DOMAIN = b"cluster"
CONNECT_TIMEOUT = 2000
"""milliseconds after which a connection is tried anew: TCP alone would wait longer and longer"""


class Node(Struct, frozen=True):
    """What a process of a cluster must know before it can ask anyone."""

    node_id: str
    """of the machine, for the cluster"""
    name: str
    """of the machine, for people"""
    host: str
    """address at which other machines reach this one"""
    fixed: dict[str, str]
    """name → `tcp://` address of what the supervisor binds: `directory` and `pulses`"""


class Address(Struct, frozen=True):
    """Where a name is bound."""

    node_id: str
    ipc: str
    tcp: str
    incarnation: int
    """of the process that binds it; a later one takes its place"""


class Announcement(Struct, tag=True):
    """Process → directory, on each connection: what it binds."""

    addresses: dict[str, Address]


class Directory(Struct, tag=True):
    """Directory → process, on each announcement and each change: what is bound where."""

    addresses: dict[str, Address]

    def add(self, announcement: Announcement) -> bool:
        """Takes in what is newer; False if nothing is."""
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
        self.endpoint = ""
        """where it is connected; empty: nowhere"""
        self.num_handshakes = 0
        """with what is there"""
        self.on_connected: Callable[[], None] = lambda: None
        self.on_return = self._leave

    def point_to(self, endpoint: str) -> None:
        """Connects it there and nowhere else."""
        if endpoint == self.endpoint:
            return
        if self.endpoint:
            self.socket.disconnect(self.endpoint)
        self.endpoint, self.num_handshakes = endpoint, 0
        self.socket.connect(endpoint)

    def connected(self, endpoint: str) -> None:
        """A handshake was made. A file of the own machine is connected again only when there is a
        new process behind it, which is told apart by its messages."""
        if endpoint != self.endpoint:
            return
        self.num_handshakes += 1
        if self.num_handshakes > 1 and not endpoint.startswith("ipc:"):
            self.on_return()
        self.on_connected()

    def _leave(self) -> None:
        raise SystemExit(f"lost {self.name} for a while, and perhaps messages: starts afresh")


class Cluster(Network):
    """The sockets of one process of a cluster. For one thread, but for `Node.fixed` names."""

    node: Node
    authenticator: Authenticator
    """answers for all sockets of this context"""
    _folder: Path
    _directory: Channel[Any]
    _bound: dict[str, Address]
    _known: dict[str, Address]
    _followings: dict[Any, _Following]
    """by socket"""
    _incarnation: int

    def __init__(self, node: Node, folder: Path, incarnation: int = 0) -> None:
        """folder: of this pipeline on this machine, with the keys in it; incarnation: of this
        process, if it binds anything. Raises KeysError."""
        super().__init__()
        self.node, self._folder = node, folder
        self._bound, self._known, self._followings = {}, {}, {}
        self._incarnation = incarnation
        self.authenticator = Authenticator(self, {ZAP_DOMAIN: folder / KEYS_FOLDER})
        self._directory = connect(self, zmq.DEALER, f"{CLUSTER}directory", Directory)
        self.handlers = [(self._directory, self._on_directory)]
        self._add_monitor(self._directory.socket, lambda _: self._announce())
        self._announce()  # it may be connected already, unseen
        self.handlers.append((self.authenticator.channel, self.authenticator.handle))

    def bind(self, socket: "zmq.Socket[bytes]", endpoint: str) -> None:
        """As `Network.bind`. Raises zmq.ZMQError and KeysError."""
        name = endpoint.removeprefix(CLUSTER)
        ipc = f"ipc://{self._folder}/{name}"
        socket.bind(ipc)  # in the clear: the folder's mode keeps others out
        tcp = bind_tcp(socket, self.node.host, self._folder)
        self._bound[name] = Address(self.node.node_id, ipc, tcp, self._incarnation)
        self._announce()

    def connect(self, socket: "zmq.Socket[bytes]", endpoint: str, wait: bool = True) -> None:
        """As `Network.connect`. Raises KeysError."""
        name = endpoint.removeprefix(CLUSTER)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT)
        if name in self.node.fixed:
            self._secure(socket)
            socket.connect(self.node.fixed[name])
            return
        following = self._followings[socket] = _Following(socket, name)
        if wait:
            self._add_monitor(socket, following.connected)
        self._point(following)
        while wait and not following.endpoint:
            attended = self.handlers[:2]  # the directory and its monitor
            zmq.select([channel.socket for channel, _ in attended], [], [])
            drain(attended)

    def on_connected(self, socket: "zmq.Socket[bytes]", handler: Callable[[], None]) -> None:
        """As `Network.on_connected`."""
        self._followings[socket].on_connected = handler

    def on_return(self, socket: "zmq.Socket[bytes]", handler: Callable[[], None]) -> None:
        """As `Network.on_return`."""
        self._followings[socket].on_return = handler

    def _add_monitor(self, socket: "zmq.Socket[bytes]", handler: Callable[[str], None]) -> None:
        """Calls `handler` with the endpoint of each connection that is made."""
        events = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)

        def attend() -> None:
            while events.poll(0):
                handler(recv_monitor_message(events)["endpoint"].decode())

        self.handlers.append((Channel(events), attend))

    def _announce(self) -> None:
        self._directory.send(Announcement(self._bound))

    def _on_directory(self) -> None:
        for _, directory in self._directory.receive():
            self._known = directory.addresses
            for socket, following in list(self._followings.items()):
                if socket.closed:  # a client that has left
                    del self._followings[socket]
                else:
                    self._point(following)

    def _point(self, following: _Following) -> None:
        address = self._known.get(following.name)
        if address is None:
            return
        if address.node_id == self.node.node_id and following.socket.mechanism == zmq.NULL:
            following.point_to(address.ipc)
        else:  # also to the own machine, if it was another one: ZeroMQ can't take the keys back
            if following.endpoint != address.tcp:
                self._secure(following.socket)
            following.point_to(address.tcp)

    def _secure(self, socket: "zmq.Socket[bytes]") -> None:
        secure_client(socket, self._folder / KEYS_FOLDER, KEYS_CLIENT)
        over_tcp(socket, self.node.host)


def bind_tcp(socket: "zmq.Socket[bytes]", host: str, folder: Path) -> str:
    """Binds a socket at a free port of `host`, for who has the keys: its `tcp://` address."""
    secure_server(socket, folder / KEYS_FOLDER, ZAP_DOMAIN)
    over_tcp(socket, host)
    socket.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def over_tcp(socket: "zmq.Socket[bytes]", host: str) -> None:
    """What a socket is to do about peers that say nothing any more."""
    socket.setsockopt(zmq.IPV6, ":" in host)
    socket.setsockopt(zmq.HEARTBEAT_IVL, round(1000 * HEARTBEAT_INTERVAL))
    socket.setsockopt(
        zmq.HEARTBEAT_TIMEOUT, round(1000 * HEARTBEAT_INTERVAL * MAX_MISSED_HEARTBEATS)
    )


def network_from_environment(folder: Path, incarnation: int) -> Cluster | None:
    """The network of a process of a cluster; None on a machine alone."""
    path = os.environ.get(NODE_VARIABLE)
    if path is None:
        return None
    return Cluster(msgspec.json.decode(Path(path).read_bytes(), type=Node), folder, incarnation)
