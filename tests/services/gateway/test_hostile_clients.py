"""Clients that send what no client sends; others are served meanwhile."""

import resource
from collections.abc import Iterable, Set
from itertools import islice
from pathlib import Path
from threading import Thread

import pytest
import zmq

from penstock.protocol.messages.client import MSGPACK, AbortReply, AbortRequest
from penstock.protocol.transport.socket_info import num_unread_bytes, tcp_counters
from penstock.services.gateway import clients, connections
from penstock.services.gateway.connections import MAX_RECEIVE_QUEUE, ConnectionLimits
from tests.services.gateway.conftest import Harness, Socket, Start
from tests.services.gateway.raw_client import GREETING, MORE, RawClient, frame

TCP = "tcp://127.0.0.1:*"
SMALL = MSGPACK.encode(AbortRequest(request_id="x"))
PIECE = frame(bytes(1 << 20), MORE)


def is_served(harness: Harness, client: Socket) -> bool:
    harness.send(client, AbortRequest(request_id="x"))
    return isinstance(harness.receive_reply(client), AbortReply)


@pytest.mark.parametrize("where", ["tcp", "ipc"])
@pytest.mark.parametrize(
    "envelope", [[b""] * 7, [bytes(1025)], [bytes(1 << 20)] * 60, [b""] * 50_000]
)
def test_an_envelope_has_limits(
    start_gateway: Start, where: str, envelope: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    harness = start_gateway(**({"endpoint": TCP} if where == "tcp" else {}))
    hostile, client = harness.connect(RECONNECT_IVL=-1), harness.connect()
    assert is_served(harness, client)
    sender = Thread(target=hostile.send_multipart, args=([*envelope, SMALL],))
    sender.start()
    harness.run_until(lambda: harness.connections.num_cut_off)
    sender.join()
    harness.run_until(lambda: len(harness.connections) == 1)
    assert is_served(harness, client)
    assert caplog.messages[-1].endswith(clients.ENVELOPE)


def test_an_envelope_within_the_limits(harness: Harness, client: Socket) -> None:
    envelope = [b"1" * 200] * 5 + [b""]
    client.send_multipart([*envelope, SMALL])
    assert harness.receive_frames(client)[:-1] == envelope


@pytest.mark.parametrize("endpoint", [TCP, ""])
def test_a_message_without_an_end(start_gateway: Start, endpoint: str) -> None:
    """One message is too long; all begun messages together are far from their limit.

    On ipc the kernel does not count bytes.
    """
    harness = start_gateway(max_open_bytes=1 << 40, **({"endpoint": endpoint} if endpoint else {}))
    client = harness.connect()
    assert is_served(harness, client)
    hostile = RawClient(harness.endpoint)
    num_bytes = 0
    while not hostile.is_closed:
        num_bytes += hostile.send_some(PIECE[num_bytes % len(PIECE) :])
        harness.run_heartbeats(1)
        assert num_bytes < 1 << 28  # on ipc more, the less bytes the heartbeats find
        assert is_served(harness, client)


def num_read(fds: Iterable[int]) -> int:
    """Return how many bytes libzmq has read."""
    found = ((tcp_counters(fd), num_unread_bytes(fd)) for fd in fds)
    return sum(counters.received - num_unread for counters, num_unread in found if counters)


def start_large_messages(start_gateway: Start, num_hostile: int) -> tuple[Harness, list[RawClient]]:
    """Let libzmq read three whole messages of an honest client, and pieces of hostile ones."""
    harness = start_gateway(endpoint=TCP, max_open_bytes=(2 << 20) * connections.EXPANSION)
    clients = [RawClient(harness.endpoint) for _ in range(1 + num_hostile)]
    harness.run_until(lambda: len(harness.connections) == len(clients))
    data = [3 * frame(b"x" * (1 << 20))] + num_hostile * [PIECE]
    senders = [
        Thread(target=client.send, args=(sent,)) for client, sent in zip(clients, data, strict=True)
    ]
    for sender in senders:
        sender.start()
    fds = [connection.fd for connection in harness.connections]
    while num_read(fds) < sum(map(len, data)):
        pass
    for sender in senders:
        sender.join()
    return harness, clients


def take_messages(harness: Harness, number: int) -> None:
    """Receive messages, and leave others in libzmq's queue."""
    while number:
        for _ in islice(harness.clients.receive(), number):
            number -= 1


def test_whole_messages_that_wait_are_not_unfinished(start_gateway: Start) -> None:
    """The gateway is late. What waits for it is more than all unfinished messages may have."""
    harness, (honest,) = start_large_messages(start_gateway, num_hostile=0)
    for _ in range(3):
        harness.run_heartbeats(2)
        take_messages(harness, 1)
    harness.run_heartbeats(2)
    assert not harness.connections.num_cut_off
    assert not honest.is_closed


def test_messages_without_an_end_while_whole_messages_wait(start_gateway: Start) -> None:
    """After as many messages as there are clients, those without any are known."""
    harness, (honest, *hostile) = start_large_messages(start_gateway, num_hostile=3)
    honest.send(100 * frame(SMALL))
    harness.run_heartbeats(2)
    assert not harness.connections.num_cut_off
    take_messages(harness, 4)
    assert harness.clients.channel.socket.poll(60_000)
    harness.run_heartbeats(1)
    assert harness.connections.num_cut_off == 2
    harness.run_until(lambda: len(harness.connections) == 2)
    assert not honest.is_closed
    assert sum(client.is_closed for client in hostile) == 2


def test_messages_without_an_end_together(start_gateway: Start) -> None:
    """The client that has sent most is disconnected."""
    harness = start_gateway(endpoint=TCP, max_open_bytes=(2 << 20) * connections.EXPANSION)
    honest, *hostile = (RawClient(harness.endpoint) for _ in range(4))
    honest.send(PIECE[: 1 << 19])
    for client in hostile:
        client.send(PIECE)
    harness.run_until(lambda: len(harness.connections) == 4)
    fds = [connection.fd for connection in harness.connections]
    num_bytes = (1 << 19) + 3 * len(PIECE)
    while num_read(fds) < num_bytes:
        harness.run_once()
    harness.run_heartbeats(1)
    assert harness.connections.num_cut_off == 2
    harness.run_until(lambda: len(harness.connections) == 2)
    harness.run_heartbeats(1)
    assert harness.connections.num_cut_off == 2
    assert not honest.is_closed


def test_pipelined_requests_are_no_message_without_an_end(start_gateway: Start) -> None:
    """The gateway is late: libzmq holds as many messages as it receives ahead."""
    harness = start_gateway(endpoint=TCP, max_request_bytes=1 << 20)
    client = RawClient(harness.endpoint)
    large = frame(b"x" * (1 << 20))
    harness.run_until(lambda: len(harness.connections) == 1)
    (connection,) = harness.connections

    def num_received() -> int:
        counters = tcp_counters(connection.fd)
        assert counters
        return counters.received

    num_bytes = 0
    while num_received() < MAX_RECEIVE_QUEUE * len(large):
        num_bytes += client.send_some(large[num_bytes % len(large) :])
    harness.run_heartbeats(1)
    assert not harness.connections.num_cut_off
    for _ in harness.clients.receive():
        harness.run_heartbeats(1)
    assert not harness.connections.num_cut_off
    assert not client.is_closed


def test_clients_of_an_older_protocol_are_dropped(
    start_gateway: Start, caplog: pytest.LogCaptureFixture
) -> None:
    harness = start_gateway(endpoint=TCP)
    client = harness.connect()
    old = RawClient(harness.endpoint, handshake=False)
    anonymous, message = b"\x01\x00", bytes([len(SMALL) + 1, 0]) + SMALL
    old.send(anonymous + 100 * message)
    harness.run_until(lambda: harness.status.reply().num_bad_frames == 100)
    assert is_served(harness, client)
    (logged,) = caplog.messages
    assert "ZMTP before version 3" in logged


@pytest.mark.parametrize("where", ["tcp", "curve", "ipc"])
def test_a_second_client_of_an_identity_is_disconnected(
    start_gateway: Start, keys: Path, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """libzmq ignores it, however small its request. When the first one leaves it is served."""
    folder = keys if where == "curve" else None
    harness = start_gateway(
        curve_keys=str(folder or ""), **({} if where == "ipc" else {"endpoint": TCP})
    )

    def connect(identity: bytes, **options: int) -> Socket:
        client = harness.connect(folder, IDENTITY=identity, **options)
        number = len(harness.connections)
        harness.run_until(lambda: len(harness.connections) > number)
        return client

    first = connect(b"x")
    assert is_served(harness, first)
    second = connect(b"x", RECONNECT_IVL=20)
    events = second.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    second.send(SMALL)
    while not events.poll(0):
        harness.run_once()  # for its key
        harness.run_heartbeats(1)
    (logged,) = caplog.messages
    assert logged.endswith(connections.IGNORED)
    assert is_served(harness, first)
    first.close()
    while not second.poll(0):
        if events.poll(0):
            events.recv_multipart()
            second.send(SMALL)
        harness.run_heartbeats(1)
        harness.run_once()


def test_a_second_client_that_sends_all_the_time_is_served_after_the_first(
    start_gateway: Start,
) -> None:
    """libzmq reads a few of its messages, and then no more; the kernel receives all."""
    harness = start_gateway(endpoint=TCP)
    first = harness.connect(IDENTITY=b"x")
    assert is_served(harness, first)
    first_fds = {connection.fd for connection in harness.connections}
    second = harness.connect(IDENTITY=b"x", RECONNECT_IVL=20)
    harness.run_until(lambda: len(harness.connections) == 2)

    def num_received(without: Set[int] = frozenset()) -> int:
        fds = {connection.fd for connection in harness.connections} - without
        return sum(its.received for its in map(tcp_counters, fds) if its)

    while num_received(first_fds) <= len(GREETING):
        harness.run_once()
    later = harness.connect()  # the thread that serves it has read the second's identity before
    assert is_served(harness, later)
    later.close()
    first.close()
    harness.run_until(lambda: len(harness.connections) == 1)
    while not second.poll(0):
        before, num_cut_off = num_received(), harness.connections.num_cut_off
        second.send(SMALL, zmq.NOBLOCK)
        while num_received() == before and num_cut_off == harness.connections.num_cut_off:
            harness.run_once()
        harness.run_heartbeats(1)
    assert harness.connections.num_cut_off == 1


def test_an_idle_client_beside_chosen_identities_stays(start_gateway: Start) -> None:
    """On TCP its bytes are counted."""
    harness = start_gateway(endpoint=TCP)
    clients = [harness.connect(IDENTITY=name) for name in (b"a", b"bcde")]
    clients.append(harness.connect())
    assert is_served(harness, clients[0])
    harness.run_until(lambda: len(harness.connections) == len(clients))
    harness.run_heartbeats(30)
    assert not harness.connections.num_cut_off
    assert all(is_served(harness, client) for client in clients)


def test_an_idle_client_on_ipc_comes_back(harness: Harness) -> None:
    idle, first = harness.connect(RECONNECT_IVL=20), harness.connect(IDENTITY=b"a")
    assert is_served(harness, first)
    harness.run_until(lambda: len(harness.connections) == 2)
    harness.run_heartbeats(30)
    assert harness.connections.num_cut_off == 1
    assert is_served(harness, idle)


def test_idle_connections_are_limited(
    start_gateway: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "max_connections", lambda: 32)
    harness = start_gateway(endpoint=TCP)
    client = harness.connect()
    assert is_served(harness, client)
    idle = [RawClient(harness.endpoint, handshake=False) for _ in range(40)]
    harness.run_until(lambda: len(harness.connections) == 1 + 32 // 8)
    harness.run_until(lambda: sum(raw.is_closed for raw in idle) == 36)
    assert harness.connections.num_cut_off == 36
    assert [raw.is_closed for raw in idle] == [True] * 36 + [False] * 4
    assert is_served(harness, client)
    newest = harness.connect(RECONNECT_IVL=-1)
    assert is_served(harness, newest)
    newest.close()
    for raw in idle:
        raw.socket.close()
    harness.run_until(lambda: len(harness.connections) == 1)
    assert is_served(harness, harness.connect())


def test_limits_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "max_connections", lambda: 64)
    limits = ConnectionLimits()

    def connect(host: str, speaks: bool) -> str | None:
        reason = limits.opened(host)
        if speaks:
            limits.spoke(host)
        if reason:
            limits.closed(host, is_silent=not speaks)
        return reason

    silent = [connect("a", False) for _ in range(9)]
    assert silent == [None] * 8 + [connections.TOO_MANY_SILENT]
    speaking = [connect("a", True) for _ in range(25)]
    assert speaking[:8] == [connections.TOO_MANY_SILENT] * 8
    for _ in range(8):
        limits.closed("a", is_silent=True)
    speaking = [connect("a", True) for _ in range(33)]
    assert speaking == [None] * 32 + [connections.TOO_MANY_OF_ONE]
    others = [connect(host, True) for host in "bcde" for _ in range(10)]
    assert others == [None] * 32 + [connections.TOO_MANY] * 8
    limits.closed("a", is_silent=False)
    assert connect("f", False) is None


def test_the_limit_follows_that_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    soft = {1024: 768, 256: 128, 1 << 20: 4096, resource.RLIM_INFINITY: 4096}
    for number, expected in soft.items():
        monkeypatch.setattr(resource, "getrlimit", lambda _, number=number: (number, number))
        assert connections.max_connections() == expected
