"""The sockets of a process: bound and connected by endpoint, on one machine or in a cluster.

| endpoint      | kind            | bound by  | connected by                        |
| ------------- | --------------- | --------- | ----------------------------------- |
| clients       | ROUTER ↔ DEALER | gateway   | clients (`--endpoint`)              |
| inner_clients | ROUTER ↔ DEALER | gateway   | http                                |
| tokenizers    | ROUTER ↔ DEALER | gateway   | tokenizers                          |
| requests      | PULL ← PUSH     | scheduler | tokenizers, gateway, detokenizers   |
| workers       | ROUTER ↔ DEALER | scheduler | workers                             |
| detokenizers  | ROUTER ↔ DEALER | scheduler | detokenizers                        |
| results       | PULL ← PUSH     | gateway   | detokenizers, scheduler, supervisor |
| supervisor    | PULL ← PUSH     | launch    | every process (`launch all` binds)  |

All except the first are `ipc://` files in the run folder or, in a cluster, names whose addresses
the directory knows (`discovery.py`). Each replica has its own set of the sockets that a scheduler
binds. With several models, each model has its own folder for all sockets except clients,
inner_clients and supervisor.

The clients' socket may speak CURVE, with the keys of a folder that `launch keys` makes:

    server.key           public key of the gateway: every client has it
    server.key_secret    secret key of the gateway: stays with it
    clients/NAME.key     public keys of the clients that the gateway admits
    NAME.key_secret      secret key of one client, which needs only this file and `server.key`

Each file is a certificate of `zmq.auth`.
"""

import errno
import logging
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import zmq
from zmq.auth import load_certificate, load_certificates
from zmq.utils import z85

from penstock.protocol.config import Config
from penstock.protocol.transport.channel import MAX_FRAME_BYTES, Channel

log = logging.getLogger(__name__)
SERVER = "server"
CLIENTS = "clients"
ZAP_DOMAIN = b"clients"
ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # where libzmq asks who may connect (ZAP, ZeroMQ RFC 27)


class KeysError(ValueError):
    """An unreadable key file, and the reason."""


def secure_server(socket: "zmq.Socket[Any]", folder: Path, domain: bytes = ZAP_DOMAIN) -> None:
    """Require CURVE of the clients of a socket that is not bound yet. Raises KeysError.

    The ZAP domain is enforced: without an `Authenticator` for the domain, libzmq admits no client.
    By default libzmq would admit every client.
    """
    socket.curve_secretkey = _secret_key(folder, SERVER)[1]
    socket.curve_server = True
    socket.setsockopt(zmq.ZAP_DOMAIN, domain)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def secure_client(socket: "zmq.Socket[Any]", folder: Path, client: str) -> None:
    """Set the CURVE keys of `client` on a socket that is not connected yet. Raises KeysError."""
    socket.curve_publickey, socket.curve_secretkey = _secret_key(folder, client)
    socket.curve_serverkey = _read(folder / f"{SERVER}.key")[0]


def admitted_keys(folder: Path) -> set[bytes]:
    """Return the public keys, in Z85, of the clients that are admitted. Raises KeysError."""
    try:
        return set(load_certificates(folder / CLIENTS))
    except (OSError, ValueError) as error:
        raise KeysError(str(error)) from error


class Authenticator:
    """The set of clients that may connect to the sockets that speak CURVE, by key.

    The folder of a socket's domain is read for every new connection. An added key is admitted at
    once, and a removed key opens no further connection.
    """

    def __init__(self, channel: Channel[Any]) -> None:
        """Start without folders. channel: the channel that is bound to ZAP_ENDPOINT."""
        self.channel = channel
        self.folders: dict[bytes, Path] = {}  # folders of keys, by domain

    def handle(self) -> None:
        """Answer every waiting query of libzmq. A refused client gets no reason."""
        for frames in self.channel.receive_frames():
            version, number, domain, address, _, _, key = (frame.bytes for frame in frames)
            status = b"200" if self._admits(domain, z85.encode(key), address) else b"400"
            user = z85.encode(key)  # libzmq adds the user to each message, as `User-Id`
            self.channel.try_send([version, number, status, b"", user, b""])

    def _admits(self, domain: bytes, key: bytes, address: bytes) -> bool:
        try:
            if key in admitted_keys(self.folders[domain]):
                return True
            reason = f"its key {key.decode()} is unknown"
        except KeysError as error:
            reason = str(error)
        self.channel.num_bad_frames += 1  # `launch status` shows the count of dropped frames
        if self.channel.num_bad_frames == 1:
            who = address.decode()
            log.warning("refused a client at %s (further ones are only counted): %s", who, reason)
        return False


def _secret_key(folder: Path, name: str) -> tuple[bytes, bytes]:
    path = folder / f"{name}.key_secret"
    public, secret = _read(path)
    if secret is None:
        raise KeysError(f"{path} has no secret key")
    return public, secret


def _read(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return load_certificate(path)
    except (OSError, ValueError) as error:
        raise KeysError(f"{path} can't be read; `launch keys` makes it ({error})") from error


CLUSTER = "cluster://"  # prefix of a name whose addresses the directory knows
# channels, each with the function to call when a message waits
Handlers = list[tuple[Channel[Any], Callable[[], None]]]


def bind(socket: "zmq.Socket[bytes]", endpoint: str) -> None:
    """Bind a socket, but not in place of a file: libzmq would remove it. Raises zmq.ZMQError."""
    path = Path(endpoint.removeprefix("ipc://"))
    if path.exists() and not path.is_socket():
        raise zmq.ZMQError(errno.EEXIST)
    socket.bind(endpoint)


class Endpoints(NamedTuple):
    """The addresses of a pipeline's sockets, as one replica uses them."""

    clients: str
    inner_clients: str
    tokenizers: str
    requests: str
    workers: str
    detokenizers: str
    results: str
    supervisor: str


_OF_SCHEDULER = ("requests", "workers", "detokenizers")


def endpoints(config: Config, replica: int = 0) -> Endpoints:
    """Return the addresses that follow from the configuration."""
    is_cluster = config.backend == "ray"
    where = CLUSTER if is_cluster else f"ipc://{config.run_folder}/"
    pipeline = CLUSTER if is_cluster else f"ipc://{config.pipeline_folder}/"
    inner = [
        f"{where}{name}{(replica or '') if name in _OF_SCHEDULER else ''}"
        for name in Endpoints._fields[2:-1]
    ]
    # `clients` in the folder may be --endpoint
    clients = f"{pipeline}{'clients' if is_cluster else 'inner'}"
    return Endpoints._make([config.endpoint, clients, *inner, f"{pipeline}supervisor"])


def stays_on_host(endpoint: str) -> bool:
    """Return True if no other machine can reach an endpoint: `ipc://`, or `tcp://` on loopback."""
    transport, _, address = endpoint.partition("://")
    is_tcp = transport == "tcp"
    return is_loopback(address.rpartition(":")[0].strip("[]")) if is_tcp else transport == "ipc"


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback address; of names, only `localhost` is."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def host_and_port(host: str, port: object) -> str:
    """Return `HOST:PORT` as in URLs, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_reach(config: Config) -> None:
    """Raise ValueError if other machines could reach the clients' socket without encryption."""
    if not (config.curve_keys or config.insecure or stays_on_host(config.endpoint)):
        raise ValueError(
            f"--endpoint {config.endpoint} may be reached from other machines: give "
            "--curve-keys FOLDER (`launch keys FOLDER` makes it), or --insecure, with which anyone "
            "may send requests and anyone on the way reads prompts and answers"
        )


class Context(zmq.Context["zmq.Socket[bytes]"]):
    """The sockets of a process on one machine; `Cluster` is the same interface for several."""

    handlers: Handlers  # channels of the context itself, which the process's event loop must serve
    node_id: str  # id of this machine; empty without a cluster
    host: str  # address at which the other processes reach this machine
    _authenticator: Authenticator | None

    def __init__(self, node_id: str = "", host: str = "127.0.0.1") -> None:
        super().__init__()
        self.node_id, self.host = node_id, host
        self.handlers = []
        self._authenticator = None

    def bind(
        self,
        kind: int,
        endpoint: str,
        receives: Any = None,
        max_bytes: int = MAX_FRAME_BYTES,
        options: Mapping[int, int] = MappingProxyType({}),
        monitor: str = "",
    ) -> Channel[Any]:
        """Return a bound channel.

        `options` are libzmq's, by number. libzmq reports every peer that connects or disconnects to
        the PAIR socket that is connected to `monitor`. Raises zmq.ZMQError, which names the
        address, if it is taken; KeysError.
        """
        socket = self._new_socket(kind, endpoint, max_bytes)
        if monitor:
            socket.monitor(monitor, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        for option, value in options.items():
            socket.setsockopt(option, value)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        channel: Channel[Any] = Channel(socket, receives)
        self.bind_also(channel, endpoint)
        return channel

    def bind_also(self, channel: Channel[Any], endpoint: str) -> None:
        """Bind a channel to one more endpoint. Raises the errors of `bind`."""
        try:
            self.bind_socket(channel.socket, endpoint)
        except zmq.ZMQError as error:
            raise zmq.ZMQError(error.errno, f"{error} ({endpoint})") from error

    def connect(
        self,
        kind: int,
        endpoint: str,
        receives: Any = None,
        identity: bytes = b"",
        max_queue: int = 0,
        wait: bool = True,
        on_reconnect: Callable[[], None] | None = None,
    ) -> Channel[Any]:
        """Return a connected channel; the peer may start later.

        `max_queue`: limit of messages that wait for the peer (0: no limit); `wait`: as in
        `connect_socket`; `on_reconnect`: handler for `Context.on_reconnect`.
        """
        socket = self._new_socket(kind, endpoint, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.SNDHWM, max_queue)
        if identity:
            socket.setsockopt(zmq.IDENTITY, identity)
        self.connect_socket(socket, endpoint, wait)
        channel: Channel[Any] = Channel(socket, receives)
        if on_reconnect:
            self.on_reconnect(channel, on_reconnect)
        return channel

    def on_connected(self, channel: Channel[Any], handler: Callable[[], None]) -> None:
        """Call `handler` whenever a channel that waited is connected.

        Its peer may be a restarted process. To be called before the event loop runs.
        """
        self.on_handshake(channel.socket, lambda _: handler())

    def on_handshake(self, socket: "zmq.Socket[bytes]", handler: Callable[[str], None]) -> None:
        """Call `handler` with the endpoint of each new connection of a socket."""
        events: Channel[Any] = Channel(socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED))

        def handle() -> None:
            for _, endpoint in events.receive_frames():
                handler(endpoint.bytes.decode())

        self.handlers.append((events, handle))

    def on_reconnect(self, channel: Channel[Any], handler: Callable[[], None]) -> None:
        """Call `handler` when a lost connection between running processes is restored.

        Messages may be lost. By default, the process exits and is restarted. Connections within a
        machine are never lost.
        """

    def admit(self, domain: bytes, folder: Path) -> None:
        """Let clients whose keys are in `folder` connect to sockets of a ZAP domain."""
        if self._authenticator is None:
            self._authenticator = Authenticator(self.bind(zmq.REP, ZAP_ENDPOINT))
            self.handlers.append((self._authenticator.channel, self._authenticator.handle))
        self._authenticator.folders[domain] = folder

    def bind_socket(self, socket: "zmq.Socket[bytes]", endpoint: str) -> None:
        """Bind a socket whose options are set. Raises zmq.ZMQError; KeysError."""
        bind(socket, endpoint)

    def connect_socket(
        self,
        socket: "zmq.Socket[bytes]",
        endpoint: str,
        wait: bool = True,  # noqa: ARG002
    ) -> None:
        """Connect a socket whose options are set. Raises KeysError.

        In a cluster the socket follows the name to each process that binds the name. Until the name
        is known, messages of a caller that does not `wait` are lost.
        """
        socket.connect(endpoint)

    def _new_socket(self, kind: int, endpoint: str, max_bytes: int) -> "zmq.Socket[bytes]":
        socket = self.socket(kind)
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.BACKLOG, 4096)  # beyond it, a client waits a second or more
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        return socket


def drain(handlers: Handlers) -> None:
    """Handle messages until none waits: a ZeroMQ file descriptor signals changes, not states."""
    busy = True
    while busy:
        busy = False
        for channel, handler in handlers:
            if channel.has_message:
                handler()
                busy = True


def attend(handlers: Handlers) -> None:
    """Handle messages in the running asyncio loop from now on, until `leave`."""
    import asyncio  # other processes have a loop of their own, and start faster without it

    loop = asyncio.get_running_loop()
    for channel, _ in handlers:
        loop.add_reader(int(channel.socket.getsockopt(zmq.FD)), drain, handlers)
    drain(handlers)


def leave(handlers: Handlers) -> None:
    """Stop handling messages after `attend`; to be called while the sockets are open."""
    import asyncio

    loop = asyncio.get_running_loop()
    for channel, _ in handlers:
        loop.remove_reader(int(channel.socket.getsockopt(zmq.FD)))
