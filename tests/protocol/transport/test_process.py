"""Duties of every process: heartbeats that nothing may stop, room for descriptors."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from penstock.protocol.config import Config, write_config
from penstock.protocol.messages.supervisor import SupervisorHeartbeat
from penstock.protocol.transport.channel import Channel
from penstock.protocol.transport.context import endpoints
from penstock.protocol.transport.heartbeat import HeartbeatSender
from penstock.protocol.transport.process import (
    MAX_DESCRIPTORS,
    SUPERVISOR_VARIABLE,
    Process,
    raise_descriptor_limit,
)


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv(SUPERVISOR_VARIABLE, str(os.getppid()))
    monkeypatch.setenv("PENSTOCK_CONFIG", str(write_config(Config(name="p"))))
    monkeypatch.setattr("penstock.protocol.transport.process.die_with_parent", lambda: None)
    one = Process("gateway")
    yield one
    one.context.destroy(linger=0)


@pytest.fixture
def supervisor(process: Process) -> Iterator[Channel[SupervisorHeartbeat]]:
    channel = process.context.bind(
        zmq.PULL, endpoints(process.config).supervisor, SupervisorHeartbeat
    )
    yield channel
    channel.socket.close(linger=0)


def received(supervisor: Channel[SupervisorHeartbeat]) -> SupervisorHeartbeat:
    assert supervisor.socket.poll(60_000)
    return msgspec.msgpack.decode(supervisor.socket.recv(), type=SupervisorHeartbeat)


def test_a_heartbeat_is_sent_without_a_descriptor_left(
    process: Process, supervisor: Channel[SupervisorHeartbeat]
) -> None:
    sender = HeartbeatSender(process)
    sender.send()
    assert received(supervisor).rss_bytes > 0  # and the connection is there
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        with pytest.raises(OSError) as refused:
            os.dup(0)
        assert refused.value.errno == errno.EMFILE
        sender.send()
        assert received(supervisor).rss_bytes > 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_counter_that_fails_stops_no_heartbeat(
    process: Process, supervisor: Channel[SupervisorHeartbeat], caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> dict[str, float]:
        raise KeyError("x")

    sender = HeartbeatSender(process, fail)
    for _ in range(2):
        sender.count()
        sender.send()
        assert "messages_sent_total" in received(supervisor).counters
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("PENSTOCK_TP", "two", "gateway: PENSTOCK_TP: got 'two', expected `int`"),
        ("PENSTOCK_LOG_LEVEL", "loud", "gateway: PENSTOCK_LOG_LEVEL: got 'loud', expected 'debug'"),
        ("PENSTOCK_CONFIG", "/none", "gateway: [Errno 2] No such file or directory: '/none'"),
        ("XDG_RUNTIME_DIR", "/none", "gateway: /none/penstock-"),
    ],
)
def test_an_invalid_environment_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, value: str, sentence: str
) -> None:
    monkeypatch.delenv("PENSTOCK_CONFIG", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv(variable, value)
    command = [sys.executable, "-P", "-m", "penstock.services.gateway"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (1, "", 1)
    assert ran.stderr.startswith(sentence)


def test_the_soft_limit_of_descriptors_is_raised() -> None:
    code = (
        "import resource as r; "
        "from penstock.protocol.transport.process import raise_descriptor_limit as f; "
        "hard = r.getrlimit(r.RLIMIT_NOFILE)[1]; r.setrlimit(r.RLIMIT_NOFILE, (64, hard)); f(); "
        "print(*r.getrlimit(r.RLIMIT_NOFILE), hard)"
    )
    command = [sys.executable, "-P", "-c", code]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    soft, *hards = map(int, printed.split())
    assert hards[0] == hards[1]
    most = MAX_DESCRIPTORS if hards[0] == resource.RLIM_INFINITY else hards[0]
    assert soft == min(most, MAX_DESCRIPTORS)


def test_a_higher_soft_limit_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = (2 * MAX_DESCRIPTORS, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda *_: pytest.fail("lowered"))
    raise_descriptor_limit()
