"""The loop in which every process waits."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from penstock.protocol.transport import event_loop
from penstock.protocol.transport.context import Context
from penstock.protocol.transport.event_loop import EventLoop


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """As they were: the loop catches them."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def loop(context: Context) -> EventLoop:
    return EventLoop(context, lambda: None)


def test_each_new_connection_is_told(context: Context, loop: EventLoop, tmp_path: Path) -> None:
    """The peer may be another process now, to which nobody has said anything."""
    address = f"ipc://{tmp_path}/peer"
    channel = context.connect(zmq.DEALER, address)
    peers = [context.bind(zmq.ROUTER, address, None)]

    def connected() -> None:
        if len(peers) == 1:
            with peers[0].socket.get_monitor_socket(zmq.EVENT_CLOSED) as events:
                peers[0].socket.unbind(address)
                events.recv_multipart()  # it has removed the file, and will not remove the next one
            peers[0].socket.close()
            peers.append(context.bind(zmq.ROUTER, address, None))
        else:
            signal.raise_signal(signal.SIGTERM)

    context.on_connected(channel, connected)
    loop.run()
    assert len(peers) == 2


def test_a_signal_after_the_end_is_no_error(
    loop: EventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ends may be asked to end once more."""
    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    loop.stop()
    loop.run()
    signal.raise_signal(signal.SIGTERM)
    assert unraisable == []


def test_other_signals_do_not_end_it(context: Context, loop: EventLoop, tmp_path: Path) -> None:
    """As that of a timer, which the loop is woken by, too."""
    inbox = context.bind(zmq.PULL, f"ipc://{tmp_path}/inbox", str)
    sender = context.connect(zmq.PUSH, f"ipc://{tmp_path}/inbox")
    before = signal.signal(signal.SIGVTALRM, lambda *_: None)
    heard: list[str] = []

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
    assert heard == ["one", "two"]


def test_timers_are_called_in_order_unless_they_are_cancelled(
    loop: EventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled one keeps neither its function nor, when there are many, its place."""
    called: list[str] = []
    moment = event_loop.monotonic()
    monkeypatch.setattr(event_loop, "monotonic", lambda: moment)
    loop.call_later(0.03, lambda: (called.append("second"), loop.stop()))  # type: ignore[arg-type]
    loop.call_later(0.01, lambda: called.append("first"))
    for _ in range(1000):
        loop.call_later(3600, lambda: called.append("never")).cancel()
    loop.call_later(0.02, lambda: called.append("after first"))
    monkeypatch.undo()
    loop.run()
    assert called == ["first", "after first", "second"]
    assert len(loop._timers) < 100


def test_a_socket_that_is_always_busy_stops_neither_timers_nor_other_sockets(
    context: Context, tmp_path: Path
) -> None:
    """Nobody waits longer than a turn of MAX_DRAIN_SECONDS."""
    busy = context.bind(zmq.PULL, f"ipc://{tmp_path}/busy", str)
    quiet = context.bind(zmq.PULL, f"ipc://{tmp_path}/quiet", str)
    to_busy = context.connect(zmq.PUSH, f"ipc://{tmp_path}/busy")
    to_quiet = context.connect(zmq.PUSH, f"ipc://{tmp_path}/quiet")
    happened: list[str] = []
    beats: list[int] = []
    loop = EventLoop(context, lambda: beats.append(1))

    def on_busy() -> None:
        for _, message in busy.receive():
            to_busy.send(message)  # there is always one more

    def on_quiet() -> None:
        happened.extend(message for _, message in quiet.receive())

    def on_timer() -> None:
        happened.append("timer")
        loop.call_later(0.01, loop.stop if "quiet" in happened else on_timer)

    loop.add(busy, on_busy)
    loop.add(quiet, on_quiet)
    loop.call_later(0.01, on_timer)
    to_busy.send("busy")
    to_quiet.send("quiet")
    loop.run()
    assert {"timer", "quiet"} <= set(happened)
    assert beats


def test_it_is_told_before_each_wait(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a process can end when nothing is left to do, whatever has ended it."""
    monkeypatch.setattr(event_loop, "HEARTBEAT_INTERVAL", 3600.0)
    order: list[str] = []

    def before_wait() -> None:
        order.append("wait")
        if "timer" in order:
            loop.stop()
        else:
            loop.call_later(0.0, lambda: order.append("timer"))

    loop = EventLoop(context, lambda: order.append("heartbeat"), before_wait=before_wait)
    loop.run()
    assert order == ["heartbeat", "wait", "timer", "wait"]
