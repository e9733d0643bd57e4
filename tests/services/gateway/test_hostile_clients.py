"""Clients that send what no client sends; others are served meanwhile."""

import resource
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest
import zmq

from penstock.launch.commands.keys import make_keys
from penstock.protocol.messages.client import MSGPACK, AbortReply, AbortRequest
from penstock.services.gateway import connection_limits, incoming
from penstock.services.gateway.connection_limits import ConnectionLimits
from penstock.services.gateway.connections import Connection
from penstock.services.gateway.wire import tcp_counters
from tests.services.gateway.conftest import Stage
from tests.services.gateway.raw_client import MORE, RawClient, frame

Start = Callable[..., Stage]
TCP = "tcp://127.0.0.1:*"
SMALL = MSGPACK.encode(AbortRequest(request_id="x"))
PIECE = frame(bytes(1 << 20), MORE)


def is_served(one: Stage, client: "zmq.Socket[bytes]") -> bool:
    one.ask(client, AbortRequest(request_id="x"))
    return isinstance(one.hear(client), AbortReply)


@pytest.mark.parametrize("where", ["tcp", "ipc"])
@pytest.mark.parametrize(
    "envelope", [[b""] * 7, [bytes(1025)], [bytes(1 << 20)] * 60, [b""] * 50_000]
)
def test_an_envelope_has_limits(
    stage: Start, where: str, envelope: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    one = stage(**({"endpoint": TCP} if where == "tcp" else {}))
    hostile, client = one.connect(RECONNECT_IVL=-1), one.connect()
    assert is_served(one, client)
    sender = Thread(target=hostile.send_multipart, args=([*envelope, SMALL],))
    sender.start()
    one.work_until(lambda: one.gateway.monitor.num_disconnected)
    sender.join()
    one.work_until(lambda: len(one.gateway.connections) == 1)
    assert is_served(one, client)
    assert caplog.messages[-1].endswith(incoming.ENVELOPE)


def test_an_envelope_within_the_limits(stage: Start) -> None:
    one = stage()
    client = one.connect()
    envelope = [b"1" * 200] * 5 + [b""]
    client.send_multipart([*envelope, SMALL])
    assert one.hear_frames(client)[:-1] == envelope


def test_a_message_without_an_end(stage: Start) -> None:
    """One message is too long; all begun messages together are far from their limit."""
    one = stage(endpoint=TCP, max_open_bytes=1 << 40)
    client = one.connect()
    assert is_served(one, client)
    hostile = RawClient(one.endpoint)
    num_bytes = 0
    while not hostile.is_closed:
        num_bytes += hostile.send_some(PIECE[num_bytes % len(PIECE) :])
        one.heartbeats(1)
        assert num_bytes < 1 << 26
        assert is_served(one, client)


def test_messages_without_an_end_together(stage: Start) -> None:
    """Who has sent most is disconnected."""
    one = stage(endpoint=TCP, max_open_bytes=(2 << 20) * incoming.EXPANSION)
    honest, *hostile = (RawClient(one.endpoint) for _ in range(4))
    honest.send(PIECE[: 1 << 19])
    for client in hostile:
        client.send(PIECE)
    one.work_until(lambda: len(one.gateway.connections) == 4)
    fds = [connection.fd for connection in one.gateway.connections]
    num_bytes = (1 << 19) + 3 * len(PIECE)
    while sum(its.received for its in map(tcp_counters, fds) if its) < num_bytes:
        one.work()
    one.heartbeats(1)
    assert one.gateway.monitor.num_disconnected == 2
    one.work_until(lambda: len(one.gateway.connections) == 2)
    one.heartbeats(1)
    assert one.gateway.monitor.num_disconnected == 2
    assert not honest.is_closed


def test_pipelined_requests_are_no_message_without_an_end(stage: Start) -> None:
    """The gateway is late: libzmq holds as many messages as it receives ahead."""
    one = stage(endpoint=TCP, max_request_bytes=1 << 20)
    client = RawClient(one.endpoint)
    large = frame(b"x" * (1 << 20))
    one.work_until(lambda: len(one.gateway.connections) == 1)
    (connection,) = one.gateway.connections

    def num_received() -> int:
        counters = tcp_counters(connection.fd)
        assert counters
        return counters.received

    num_bytes = 0
    while num_received() < incoming.MAX_QUEUE * len(large):
        num_bytes += client.send_some(large[num_bytes % len(large) :])
    one.heartbeats(1)
    assert not one.gateway.monitor.num_disconnected
    for _ in one.gateway.incoming.receive():
        one.heartbeats(1)
    assert not one.gateway.monitor.num_disconnected
    assert not client.is_closed


def test_clients_of_an_older_protocol_are_dropped(
    stage: Start, caplog: pytest.LogCaptureFixture
) -> None:
    one = stage(endpoint=TCP)
    client = one.connect()
    old = RawClient(one.endpoint, handshake=False)
    anonymous, message = b"\x01\x00", bytes([len(SMALL) + 1, 0]) + SMALL
    old.send(anonymous + 100 * message)
    one.work_until(lambda: one.gateway.status().num_bad_frames == 100)
    assert is_served(one, client)
    (logged,) = caplog.messages
    assert "ZMTP before version 3" in logged


@pytest.mark.parametrize("keys", [False, True])
def test_a_second_client_of_an_identity_is_disconnected(
    stage: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, keys: bool
) -> None:
    """libzmq ignores it. One that is idle stays."""
    folder = tmp_path / "keys" if keys else None
    if folder:
        make_keys(folder, None)
    one = stage(endpoint=TCP, keys=str(folder or ""))

    def connect(identity: bytes) -> "zmq.Socket[bytes]":
        client = one.connect(folder, RECONNECT_IVL=-1, IDENTITY=identity)  # type: ignore[arg-type]
        number = len(one.gateway.connections)
        one.work_until(lambda: len(one.gateway.connections) > number)
        return client

    first = connect(b"x" * 200)
    assert is_served(one, first)
    idle = connect(b"y" * 255)
    second = connect(b"x" * 200)
    second.send(MSGPACK.encode(AbortRequest(request_id="x")) + bytes(1000))
    while not one.gateway.monitor.num_disconnected:
        one.work()  # for its key
        one.heartbeats(1)
    one.work_until(lambda: len(one.gateway.connections) == 2)
    (logged,) = caplog.messages
    assert logged.endswith(incoming.IGNORED)
    one.heartbeats(30)
    assert is_served(one, first)
    assert is_served(one, idle)


def test_idle_connections_are_limited(stage: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "max_connections", lambda: 32)
    one = stage(endpoint=TCP)
    client = one.connect()
    assert is_served(one, client)
    idle = [RawClient(one.endpoint, handshake=False) for _ in range(40)]
    one.work_until(lambda: len(one.gateway.connections) == 1 + 32 // 8)
    one.work_until(lambda: sum(one.is_closed for one in idle) == 36)
    assert one.gateway.monitor.num_disconnected == 36
    assert is_served(one, client)
    for each in idle:
        each.socket.close()
    one.work_until(lambda: len(one.gateway.connections) == 1)
    assert is_served(one, one.connect())


def test_limits_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "max_connections", lambda: 64)
    limits = ConnectionLimits()

    def connect(host: str, speaks: bool) -> tuple[Connection, str | None]:
        connection = Connection()
        connection.host = host
        reason = limits.add(connection)
        if speaks:
            limits.spoke(connection)
            connection.num_messages = 1
        if reason:
            limits.remove(connection)
        return connection, reason

    silent = [connect("a", False) for _ in range(9)]
    assert [reason for _, reason in silent] == [None] * 8 + [connection_limits.TOO_MANY_SILENT]
    speaking = [connect("a", True) for _ in range(25)]
    assert [reason for _, reason in speaking[:8]] == [connection_limits.TOO_MANY_SILENT] * 8
    for connection, _ in silent[:8]:
        limits.remove(connection)
    speaking = [connect("a", True) for _ in range(33)]
    assert [reason for _, reason in speaking] == [None] * 32 + [connection_limits.TOO_MANY_OF_ONE]
    others = [connect(host, True)[1] for host in "bcde" for _ in range(10)]
    assert others == [None] * 32 + [connection_limits.TOO_MANY] * 8
    limits.remove(speaking[0][0])
    assert connect("f", False)[1] is None


def test_the_limit_follows_that_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    soft = {1024: 768, 256: 128, 1 << 20: 4096, resource.RLIM_INFINITY: 4096}
    for number, expected in soft.items():
        monkeypatch.setattr(resource, "getrlimit", lambda _, number=number: (number, number))
        assert connection_limits.max_connections() == expected


def test_who_shows_no_key_has_ten_seconds(stage: Start) -> None:
    assert stage().gateway.clients.socket.getsockopt(zmq.HANDSHAKE_IVL) == 10_000
