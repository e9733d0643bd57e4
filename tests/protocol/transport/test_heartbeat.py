"""Heartbeats of a process whose main thread is at work."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from penstock.protocol.config import Config, write_config
from penstock.protocol.messages.pipeline import FromTokenizer, Heartbeat
from penstock.protocol.messages.supervisor import SupervisorHeartbeat
from penstock.protocol.transport.channel import HEARTBEAT_INTERVAL, Channel
from penstock.protocol.transport.context import endpoints
from penstock.protocol.transport.heartbeat import MAX_MISSED, HeartbeatThread
from penstock.protocol.transport.process import SUPERVISOR_VARIABLE, Process

pytestmark = pytest.mark.slow

TIMEOUT = 60_000


class Site:
    """A process, its supervisor, and a peer that it sends heartbeats to."""

    def __init__(self) -> None:
        self.process = Process("tokenizer")
        context, at = self.process.context, endpoints(self.process.config)
        self.supervisor: Channel[Any] = context.bind(zmq.PULL, at.supervisor, SupervisorHeartbeat)
        self.peer: Channel[Any] = context.bind(zmq.ROUTER, at.tokenizers, FromTokenizer)
        self.to_peer: Channel[Any] = context.connect(zmq.DEALER, at.tokenizers)
        self.counters: dict[str, float] = {"n": 1}
        self.heartbeats = HeartbeatThread(
            self.process, lambda: dict(self.counters), lambda: self.to_peer.send(Heartbeat("t"))
        )

    def heartbeat(self) -> SupervisorHeartbeat:
        """Return the next one."""
        assert self.supervisor.socket.poll(TIMEOUT)
        return msgspec.msgpack.decode(self.supervisor.socket.recv(), type=SupervisorHeartbeat)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv(SUPERVISOR_VARIABLE, str(os.getppid()))
    monkeypatch.setenv("PENSTOCK_CONFIG", str(write_config(Config(name="p"))))
    monkeypatch.setattr("penstock.protocol.transport.process.die_with_parent", lambda: None)
    one = Site()
    yield one
    one.heartbeats.stop()
    one.process.context.destroy(linger=0)


def test_who_is_at_work_is_heard_by_all(site: Site) -> None:
    """The main thread waits here, and sends nothing itself."""
    site.heartbeats.beat()
    with site.heartbeats.working:
        assert site.peer.socket.poll(TIMEOUT)
        assert next(site.peer.receive())[1] == Heartbeat("t")
        site.heartbeat()
        heartbeat = site.heartbeat()
        while not heartbeat.busy_seconds:
            heartbeat = site.heartbeat()
        while site.heartbeat().busy_seconds <= heartbeat.busy_seconds:
            continue  # it was late itself
    site.counters["n"] = 2
    site.heartbeats.beat()
    heartbeat = site.heartbeat()
    while heartbeat.busy_seconds:
        heartbeat = site.heartbeat()
    assert heartbeat.counters["n"] == 2


def test_the_main_thread_s_sockets_are_left_alone(site: Site) -> None:
    site.heartbeats.beat()
    for _ in range(4):
        site.heartbeat()
    assert not site.peer.socket.poll(0)


def test_it_ends(site: Site) -> None:
    site.heartbeats.stop()
    site.heartbeats.stop()
    other = HeartbeatThread(site.process)
    other.beat()
    other.stop()
    assert not other._thread.is_alive()


def test_a_time_in_which_nothing_ran_belongs_to_no_work(site: Site) -> None:
    """A machine was suspended for an hour, in which the main thread was at something."""
    site.heartbeats.beat()
    site.heartbeats.stop()  # it would notice a busy machine, too
    site.heartbeats._due -= 3700
    site.heartbeats.waited(MAX_MISSED * HEARTBEAT_INTERVAL)  # this is a busy machine
    assert site.heartbeats.busy_seconds >= 3699
    site.heartbeats.waited(3600)
    assert 99 <= site.heartbeats.busy_seconds < 3600
