"""The loop that every process but the gateway waits in."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from penstock.protocol.transport.channel import bind, connect
from penstock.protocol.transport.process import Loop


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """As they were: the loop catches them."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_each_new_connection_is_told(tmp_path: Path) -> None:
    """The peer may be another process now, to which nobody has said anything."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = f"ipc://{tmp_path}/peer"
    channel = connect(context, zmq.DEALER, address)
    peers = [bind(context, zmq.ROUTER, address, None)]
    loop = Loop(lambda: None)

    def connected() -> None:
        if len(peers) == 1:
            peers[0].socket.close()
            peers.append(bind(context, zmq.ROUTER, address, None))
        else:
            signal.raise_signal(signal.SIGTERM)

    loop.add_connection(channel, connected)
    loop.run()
    context.destroy()
    assert len(peers) == 2


def test_other_signals_do_not_end_it(tmp_path: Path) -> None:
    """As that of a timer, which the loop is woken by, too."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox = bind(context, zmq.PULL, f"ipc://{tmp_path}/inbox", str)
    sender = connect(context, zmq.PUSH, f"ipc://{tmp_path}/inbox")
    before = signal.signal(signal.SIGVTALRM, lambda *_: None)
    heard: list[str] = []
    loop = Loop(lambda: None)

    def on_message() -> None:
        heard.extend(message for _, message in inbox.receive())
        if heard == ["one"]:
            signal.raise_signal(signal.SIGVTALRM)
            sender.send("two")
        else:
            signal.raise_signal(signal.SIGTERM)

    loop.add(inbox, on_message)
    sender.send("one")
    loop.run()
    signal.signal(signal.SIGVTALRM, before)
    context.destroy()
    assert heard == ["one", "two"]
