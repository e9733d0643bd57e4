"""Channels: typed messages, garbage, peers that disconnect."""

from pathlib import Path
from typing import Any

import pytest
import zmq

from penstock.protocol.messages.pipeline import Goodbye, Heartbeat
from penstock.protocol.transport.channel import MAX_FRAME_BYTES, traffic
from penstock.protocol.transport.context import Context

GARBAGE = [
    b"",
    b"\xc1",
    b"hello",
    b"\x81\xa4type\xa7Unknown",
    b"\xff" * 1000,
    b"\x93\x01\x02\x03",
    b"\x91" * 5000,
]


def test_garbage_is_dropped_and_counted(context: Context, tmp_path: Path) -> None:
    server = context.bind(zmq.PULL, f"ipc://{tmp_path}/a", Heartbeat | Goodbye)
    client = context.connect(zmq.PUSH, f"ipc://{tmp_path}/a")
    for frame in GARBAGE:
        client.send_bytes(frame)
    client.socket.send_multipart([b"two", b"frames"])
    client.send(Heartbeat("d"))
    received: list[Any] = []
    while not received:
        assert server.socket.poll(60_000)
        received = [message for _, message in server.receive()]
    assert received == [Heartbeat("d")]
    assert server.num_bad_frames == len(GARBAGE) + 1


def test_all_traffic_is_counted(context: Context) -> None:
    before = vars(traffic).copy()
    server = context.bind(zmq.PULL, "inproc://a", Heartbeat | Goodbye)
    client = context.connect(zmq.PUSH, "inproc://a")
    for frame in (b"\xc1", client.encode(Goodbye()), client.encode(Goodbye())):
        client.send_bytes(frame)
    assert len(list(server.receive())) == 2
    counted = {name: value - before.get(name, 0) for name, value in vars(traffic).items()}
    assert counted == {"messages_sent": 3, "messages_received": 3, "bad_frames": 1}


def test_a_queue_with_a_limit(context: Context, tmp_path: Path) -> None:
    """While nobody is there, the newest messages are dropped."""
    client = context.connect(zmq.PUSH, f"ipc://{tmp_path}/a", max_queue=1)
    assert [client.send(Heartbeat(str(number))) for number in range(3)] == [True, False, False]
    server = context.bind(zmq.PULL, f"ipc://{tmp_path}/a", Heartbeat | Goodbye)
    assert server.socket.poll(60_000)
    assert [message for _, message in server.receive()] == [Heartbeat("0")]


def test_no_flood_keeps_the_receiver_from_other_things(context: Context) -> None:
    server = context.bind(zmq.PULL, "inproc://a", Heartbeat | Goodbye)
    client = context.connect(zmq.PUSH, "inproc://a")
    for _ in range(5):
        client.send(Goodbye())
    assert [len(list(server.receive(seconds=0.0))) for _ in range(2)] == [1, 1]
    assert [len(list(server.receive())) for _ in range(2)] == [3, 0]


def test_a_peer_that_is_gone_is_told(context: Context, tmp_path: Path) -> None:
    server = context.bind(zmq.ROUTER, f"ipc://{tmp_path}/a", Heartbeat | Goodbye)
    client = context.connect(zmq.DEALER, f"ipc://{tmp_path}/a", Heartbeat | Goodbye, b"me")
    client.send(Heartbeat("d"))
    assert server.socket.poll(60_000)
    assert list(server.receive()) == [(b"me", Heartbeat("d"))]
    assert server.send(Goodbye(), b"me")
    assert client.socket.poll(60_000)
    assert [message for _, message in client.receive()] == [Goodbye()]
    assert not server.send(Goodbye(), b"nobody")


def test_a_frame_that_is_too_long_ends_its_connection(context: Context, tmp_path: Path) -> None:
    server = context.bind(zmq.ROUTER, f"ipc://{tmp_path}/a", None, max_bytes=1000)
    client = context.connect(zmq.DEALER, f"ipc://{tmp_path}/a", identity=b"me")
    monitor = client.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    client.send_bytes(b"x" * 1001)
    assert monitor.poll(60_000)
    client.send_bytes(b"x" * 1000)
    assert server.socket.poll(60_000)
    (frames,) = server.receive_frames()
    assert [frame.bytes for frame in frames] == [b"me", b"x" * 1000]
    client.socket.disable_monitor()
    monitor.close()


def test_every_socket_has_a_limit(context: Context, tmp_path: Path) -> None:
    server = context.bind(zmq.PULL, f"ipc://{tmp_path}/a", None)
    client = context.connect(zmq.PUSH, f"ipc://{tmp_path}/a")
    for channel in (server, client):
        assert channel.socket.getsockopt(zmq.MAXMSGSIZE) == MAX_FRAME_BYTES


def test_an_address_in_use_is_named(context: Context) -> None:
    first = context.socket(zmq.ROUTER)
    port = first.bind_to_random_port("tcp://127.0.0.1")
    with pytest.raises(zmq.ZMQError, match=f"tcp://127.0.0.1:{port}"):
        context.bind(zmq.ROUTER, f"tcp://127.0.0.1:{port}", None)
