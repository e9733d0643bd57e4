"""A ZeroMQ context, a process, and the supervisor that hears its heartbeats."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from penstock.protocol.config import Config, write_config
from penstock.protocol.messages.supervisor import SupervisorHeartbeat
from penstock.protocol.transport.context import Context, endpoints
from penstock.protocol.transport.process import SUPERVISOR_VARIABLE, Process

TIMEOUT = 60_000
NextHeartbeat = Callable[[], SupervisorHeartbeat]


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv(SUPERVISOR_VARIABLE, str(os.getppid()))
    monkeypatch.setenv("PENSTOCK_CONFIG", str(write_config(Config(name="p"))))
    monkeypatch.setattr("penstock.protocol.transport.process.die_with_parent", lambda: None)
    process = Process("tokenizer")
    yield process
    process.context.destroy(linger=0)


@pytest.fixture
def heartbeat(process: Process) -> NextHeartbeat:
    """Return a function that waits for the next heartbeat at the supervisor."""
    address = endpoints(process.config).supervisor
    channel = process.context.bind(zmq.PULL, address, SupervisorHeartbeat)

    def receive() -> SupervisorHeartbeat:
        assert channel.socket.poll(TIMEOUT)
        return msgspec.msgpack.decode(channel.socket.recv(), type=SupervisorHeartbeat)

    return receive
