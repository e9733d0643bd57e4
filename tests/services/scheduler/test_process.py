"""The scheduler's process without its peers: what it does with a request that it knows."""

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from penstock.protocol.config import Config
from penstock.protocol.endpoints import Endpoints
from penstock.protocol.messages import StreamOpened, TokenizedRequest
from penstock.protocol.plan import pack
from penstock.protocol.sampling import SamplingParams
from penstock.services.scheduler.block_manager import BlockManager
from penstock.services.scheduler.block_pool import BlockPool
from penstock.services.scheduler.process import SchedulerProcess
from penstock.services.scheduler.scheduler import Scheduler

SAMPLING = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, max_tokens=5)


@pytest.fixture
def process(tmp_path: Path) -> Iterator[SchedulerProcess]:
    context: zmq.Context[Any] = zmq.Context()
    at = Endpoints(*(f"ipc://{tmp_path}/{name}" for name in Endpoints._fields))
    config = Config()
    own = SimpleNamespace(
        config=config, log=logging.getLogger(), context=context, endpoints=at, name="scheduler.1"
    )
    one = SchedulerProcess(own)  # type: ignore[arg-type]
    one.scheduler = Scheduler(config, 100, BlockManager(BlockPool(16), 4, 0, True))
    one.streams.alive(b"d", "detokenizer.1")
    yield one
    context.destroy(linger=0)


def opened(process: SchedulerProcess) -> list[StreamOpened]:
    """What the detokenizer is told of."""
    return [one for _, delta in process.streams.take_deltas() for one in delta.opened]


def request(attempt: int = 0) -> TokenizedRequest:
    return TokenizedRequest("r", attempt, SAMPLING, pack([1, 2, 3]))


def test_a_request_that_has_ended_is_told_again(process: SchedulerProcess) -> None:
    process.accept(request())
    sequence = process.requests["r"]
    sequence.token_ids += [7, 8]
    assert process.scheduler
    process.scheduler.finish(sequence, "stop")
    opened(process)
    process.accept(request())
    assert process.requests["r"] is sequence
    (again,) = opened(process)
    assert (again.request_id, again.attempt, again.finish_reason) == ("r", 0, "stop")
    assert again.output_token_ids == pack([7, 8])


def test_an_earlier_attempt_changes_nothing(process: SchedulerProcess) -> None:
    process.accept(request(attempt=2))
    sequence = process.requests["r"]
    process.accept(request(attempt=1))
    assert process.requests["r"] is sequence
    assert opened(process) == []


def test_a_later_attempt_takes_the_place_of_an_earlier_one(process: SchedulerProcess) -> None:
    process.accept(request())
    first = process.requests["r"]
    process.accept(request(attempt=1))
    assert process.requests["r"] is not first
    assert process.requests["r"].attempt == 1
    assert first.finish_reason == "abort"
