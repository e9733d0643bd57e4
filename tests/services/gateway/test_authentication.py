"""Admission to the clients' socket, with real sockets."""

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from penstock.launch.pipeline.keys import make_keys
from penstock.protocol.config import Config
from penstock.protocol.transport.channel import OVERSIZE_SLACK
from penstock.protocol.transport.context import Context, secure_client, secure_server
from penstock.services.gateway.clients import ClientSocket
from penstock.services.gateway.ledger import Ledger

TIMEOUT = 60_000
Socket = zmq.Socket[bytes]
Secure = Callable[[Socket], None]


def bind(context: Context, config: Config, inner: str) -> ClientSocket:
    endpoints = SimpleNamespace(inner_clients=inner)
    process = SimpleNamespace(context=context, config=config, endpoints=endpoints)
    return ClientSocket(process, Ledger(), on_defect=lambda _: None)  # type: ignore[arg-type]


class Door:
    """The clients' socket, with its handlers run as the gateway runs them."""

    def __init__(self, context: Context, config: Config) -> None:
        self.config = config
        clients = bind(context, config, f"{config.endpoint}-inner")
        monitor = clients.connections.monitor
        self.channel = clients.channel
        self.handlers = [(monitor, clients.connections.handle_events), *context.handlers]
        self._context = context

    def knock(self, secure: Secure, frame: bytes) -> tuple[int, Socket]:
        """Connect a client that sends a frame: the event that ends its handshake."""
        client = self._context.socket(zmq.DEALER)
        client.setsockopt(zmq.LINGER, 0)
        secure(client)
        ends = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        monitor = client.get_monitor_socket(ends | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
        client.connect(self.config.endpoint)
        client.send(frame)
        poller = zmq.Poller()
        for socket in (monitor, *(channel.socket for channel, _ in self.handlers)):
            poller.register(socket, zmq.POLLIN)
        while monitor not in (events := dict(poller.poll(TIMEOUT))):
            assert events, "no end of the handshake"
            for _, handle in self.handlers:
                handle()
        event = int(recv_monitor_message(monitor)["event"])
        client.disable_monitor()
        monitor.close()
        return event, client

    def heard(self) -> bytes:
        """Return the next frame that got in."""
        assert self.channel.socket.poll(TIMEOUT)
        return self.channel.socket.recv_multipart()[-1]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", None)
    return tmp_path / "keys"


@pytest.fixture
def stranger(tmp_path: Path, keys: Path) -> Secure:
    """Connect a client that knows the server's public key, and whose own is not admitted."""
    make_keys(tmp_path / "strange", None)
    shutil.copy(keys / "server.key", tmp_path / "strange" / "server.key")
    return lambda socket: secure_client(socket, tmp_path / "strange", "client")


@pytest.fixture
def door(tmp_path: Path, keys: Path) -> Iterator[Door]:
    context: Context = Context()
    yield Door(context, Config(endpoint=f"ipc://{tmp_path}/clients", curve_keys=str(keys)))
    context.destroy(linger=0)


def test_an_unknown_key_gets_nothing_in(
    door: Door, keys: Path, stranger: Secure, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for number in range(2):
            event, _ = door.knock(stranger, b"strange%d" % number)
            assert event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    _, (authenticator, _) = door.handlers
    assert authenticator.num_bad_frames == 2
    assert ["unknown" in message for message in caplog.messages] == [True]
    event, _ = door.knock(lambda socket: secure_client(socket, keys, "client"), b"known")
    assert event == zmq.EVENT_HANDSHAKE_SUCCEEDED
    assert door.heard() == b"known"
    assert not door.channel.socket.poll(0)


def test_a_client_without_keys_gets_nothing_in(door: Door, keys: Path) -> None:
    event, _ = door.knock(lambda _: None, b"plain")
    assert event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    door.knock(lambda socket: secure_client(socket, keys, "client"), b"known")
    assert door.heard() == b"known"
    assert not door.channel.socket.poll(0)


def test_keys_are_added_and_removed_while_it_runs(door: Door, keys: Path) -> None:
    def alice(socket: Socket) -> None:
        secure_client(socket, keys, "alice")

    make_keys(keys, "alice")
    assert door.knock(alice, b"early")[0] == zmq.EVENT_HANDSHAKE_SUCCEEDED
    (keys / "clients" / "alice.key").unlink()
    assert door.knock(alice, b"late")[0] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    assert door.heard() == b"early"
    assert not door.channel.socket.poll(0)


def test_keys_that_can_not_be_read_let_nobody_in(
    door: Door, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (keys / "clients" / "broken.key").write_text("nonsense")
    event, _ = door.knock(lambda socket: secure_client(socket, keys, "client"), b"known")
    assert event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    assert "broken.key" in caplog.text


def test_where_nobody_answers_for_the_keys_nobody_gets_in(tmp_path: Path, keys: Path) -> None:
    """As when the gateway ends: libzmq would let everybody in if the domain were not enforced."""
    endpoint = f"ipc://{tmp_path}/clients"
    with (
        Context() as context,
        context.socket(zmq.DEALER) as client,
        context.socket(zmq.ROUTER) as server,
    ):
        secure_server(server, keys)
        server.bind(endpoint)
        secure_client(client, keys, "client")
        ends = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        monitor = client.get_monitor_socket(ends)
        client.connect(endpoint)
        assert monitor.poll(TIMEOUT)
        event = recv_monitor_message(monitor)["event"]
        client.disable_monitor()
        monitor.close()
    assert event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


def test_in_the_clear_only_where_it_was_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inner = f"ipc://{tmp_path}/inner"
    with Context() as context:
        with pytest.raises(ValueError, match=r"tcp://0.0.0.0:\* may be reached"):
            bind(context, Config(endpoint="tcp://0.0.0.0:*"), inner)
        config = Config(endpoint="tcp://0.0.0.0:*", insecure=True, max_request_bytes=2000)
        clients = bind(context, config, inner)
        monitor = clients.connections.monitor
        assert not context.handlers
        assert "network's traffic reads prompts and answers" in caplog.text
        assert clients.channel.socket.getsockopt(zmq.MAXMSGSIZE) == 2000 + OVERSIZE_SLACK
        clients.channel.socket.close()
        monitor.socket.close()
