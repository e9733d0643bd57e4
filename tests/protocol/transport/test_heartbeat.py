"""Heartbeats that nothing may stop: neither work of the main thread nor a lack of descriptors."""

import errno
import os
import resource
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from penstock.protocol.messages.pipeline import FromTokenizer, Heartbeat
from penstock.protocol.transport.channel import HEARTBEAT_INTERVAL, Channel
from penstock.protocol.transport.context import endpoints
from penstock.protocol.transport.heartbeat import MAX_MISSED, HeartbeatSender, HeartbeatThread
from penstock.protocol.transport.process import Process
from tests.protocol.transport.conftest import TIMEOUT, NextHeartbeat


@pytest.fixture
def peer(process: Process) -> Channel[Any]:
    """Return a peer that the process sends heartbeats to."""
    address = endpoints(process.config).tokenizers
    channel: Channel[Any] = process.context.bind(zmq.ROUTER, address, FromTokenizer)
    return channel


@pytest.fixture
def counters() -> dict[str, float]:
    return {"n": 1}


@pytest.fixture
def heartbeats(
    process: Process, peer: Channel[Any], counters: dict[str, float]
) -> Iterator[HeartbeatThread]:
    to_peer = process.context.connect(zmq.DEALER, peer.last_endpoint.decode())
    thread = HeartbeatThread(process, lambda: dict(counters), lambda: to_peer.send(Heartbeat("t")))
    yield thread
    thread.stop()


@pytest.mark.slow
def test_who_is_at_work_is_heard_by_all(
    heartbeats: HeartbeatThread,
    heartbeat: NextHeartbeat,
    peer: Channel[Any],
    counters: dict[str, float],
) -> None:
    """The main thread waits here, and sends nothing itself."""
    heartbeats.beat()
    with heartbeats.working:
        assert peer.socket.poll(TIMEOUT)
        assert next(peer.receive())[1] == Heartbeat("t")
        heartbeat()
        heard = heartbeat()
        while not heard.busy_seconds:
            heard = heartbeat()
        while heartbeat().busy_seconds <= heard.busy_seconds:
            continue  # it was late itself
    counters["n"] = 2
    heartbeats.beat()
    heard = heartbeat()
    while heard.busy_seconds:
        heard = heartbeat()
    assert heard.counters["n"] == 2


@pytest.mark.slow
def test_the_main_thread_s_sockets_are_left_alone(
    heartbeats: HeartbeatThread, heartbeat: NextHeartbeat, peer: Channel[Any]
) -> None:
    heartbeats.beat()
    for _ in range(4):
        heartbeat()
    assert not peer.socket.poll(0)


def test_the_thread_ends(process: Process, heartbeats: HeartbeatThread) -> None:
    heartbeats.stop()
    heartbeats.stop()
    other = HeartbeatThread(process)
    other.beat()
    other.stop()
    assert not other._thread.is_alive()


class Raced(threading.Event):
    """An event that is set as soon as a thread has found that it is not."""

    was_unset = False

    def is_set(self) -> bool:
        found = super().is_set()
        if not found and not self.was_unset:
            self.was_unset = True
            self.set()
        return found


def test_a_report_is_heard_whenever_it_is_called(heartbeats: HeartbeatThread) -> None:
    """A worker would wait for the report for good, and never take its place."""
    heartbeats._called = Raced()
    heartbeats.start()
    assert heartbeats._sent.wait(TIMEOUT / 1000)


def test_a_time_in_which_nothing_ran_belongs_to_no_work(heartbeats: HeartbeatThread) -> None:
    """A machine was suspended for an hour, in which the main thread was at something."""
    heartbeats.beat()
    heartbeats.stop()  # it would notice a busy machine, too
    heartbeats._due -= 3700
    heartbeats.waited(MAX_MISSED * HEARTBEAT_INTERVAL)  # this is a busy machine
    assert heartbeats.busy_seconds >= 3699
    heartbeats.waited(3600)
    assert 99 <= heartbeats.busy_seconds < 3600


def test_slow_work_that_gets_on_is_not_stuck(process: Process) -> None:
    """Each layer of a step counts, though the main thread says nothing for an hour."""
    layers = iter([1, 1, 2, 2])
    heartbeats = HeartbeatThread(process, work=lambda: next(layers))
    heartbeats.look()
    heartbeats.progress()
    heartbeats._due -= 3600
    heartbeats._worked_at -= 3600
    heartbeats.look()
    assert heartbeats.busy_seconds >= 3599
    heartbeats.look()
    assert heartbeats.busy_seconds == 0
    heartbeats._worked_at -= 1800
    heartbeats.look()
    assert 1799 <= heartbeats.busy_seconds < 3599, "since the last layer"
    heartbeats.rest()
    assert heartbeats.busy_seconds == 0


def test_a_heartbeat_is_sent_without_a_descriptor_left(
    process: Process, heartbeat: NextHeartbeat
) -> None:
    sender = HeartbeatSender(process)
    sender.send()
    assert heartbeat().rss_bytes > 0  # and the connection is there
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        with pytest.raises(OSError) as refused:
            os.dup(0)
        assert refused.value.errno == errno.EMFILE
        sender.send()
        assert heartbeat().rss_bytes > 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_counter_that_fails_stops_no_heartbeat(
    process: Process, heartbeat: NextHeartbeat, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> dict[str, float]:
        raise KeyError("x")

    sender = HeartbeatSender(process, fail)
    for _ in range(2):
        sender.count()
        sender.send()
        assert "messages_sent_total" in heartbeat().counters
    assert len(caplog.records) == 1
