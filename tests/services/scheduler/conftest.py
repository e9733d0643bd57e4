"""Fixtures, and the number of examples of property tests."""

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from hypothesis import settings

from penstock.protocol.config import Config
from penstock.protocol.messages.pipeline import Heartbeat, ToDetokenizer
from penstock.protocol.transport.channel import Channel
from penstock.protocol.transport.context import Context, Endpoints
from penstock.services.scheduler.blocks.block_manager import BlockManager
from penstock.services.scheduler.blocks.block_pool import BlockPool
from penstock.services.scheduler.process import SchedulerProcess
from penstock.services.scheduler.scheduler import Scheduler
from tests.search import scaled
from tests.services.scheduler.processes import INCARNATION, NUM_BLOCKS, Gateway

settings.register_profile(
    "scheduler",
    max_examples=scaled(50),
    stateful_step_count=40,
)


@pytest.fixture
def context() -> Iterator[Context]:
    one: Context = Context()
    yield one
    one.destroy(linger=0)


@pytest.fixture
def at(tmp_path: Path) -> Endpoints:
    return Endpoints(*(f"ipc://{tmp_path}/{name}" for name in Endpoints._fields))


@pytest.fixture
def gateway(context: Context, at: Endpoints) -> Gateway:
    return Gateway(context, at)


@pytest.fixture
def detokenizer(context: Context, at: Endpoints) -> Channel[Any]:
    return context.connect(zmq.DEALER, at.detokenizers, ToDetokenizer, b"d")


@pytest.fixture
def fresh(context: Context, at: Endpoints, detokenizer: Channel[Any]) -> SchedulerProcess:
    """Return a scheduler that knows a detokenizer, and no worker yet; a lease is over at once."""
    own = SimpleNamespace(
        config=Config(lease_timeout=1e-9),
        log=logging.getLogger(),
        context=context,
        endpoints=at,
        name="scheduler.1",
        replica=0,
        incarnation=INCARNATION,
    )
    process = SchedulerProcess(own)  # type: ignore[arg-type]
    detokenizer.send(Heartbeat("detokenizer.1"))
    assert process.detokenizers.socket.poll(60_000)
    process.on_detokenizers()
    return process


@pytest.fixture
def process(fresh: SchedulerProcess) -> SchedulerProcess:
    """One with workers."""
    fresh.scheduler = make_scheduler(fresh)
    return fresh


def make_scheduler(process: SchedulerProcess) -> Scheduler:
    return Scheduler(process.config, 100, BlockManager(BlockPool(NUM_BLOCKS), 4, 0, True))
