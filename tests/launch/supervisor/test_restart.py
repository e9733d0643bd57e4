"""When a restarted process counts as back, against a gateway that says what the test wants."""

import asyncio
import contextlib
from pathlib import Path

from penstock.launch.supervisor.control_server import restart
from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.messages.client import Reply, Request, StatusRequest
from penstock.protocol.messages.status import SchedulerStatus, StatusReply
from tests.launch.fake_gateway import Gateway


def status(*detokenizers: str) -> StatusReply:
    return StatusReply(
        ready=True,
        model="",
        num_requests=0,
        tokenizers={},
        schedulers=[
            SchedulerStatus(epoch=1, ready=True, detokenizers=dict.fromkeys(detokenizers, 0))
        ],
        num_bad_frames=0,
    )


def test_a_predecessor_is_not_taken_for_its_successor(tmp_path: Path) -> None:
    """A process starts when the other's name is removed, and is back when its own name is there."""
    reports = iter([["detokenizer.1", "detokenizer.2"], ["detokenizer.2"], [], ["detokenizer.1"]])
    happened: list[object] = []

    def behaviour(request: Request) -> list[Reply]:
        assert isinstance(request, StatusRequest)
        names = next(reports) if request.fresh else "ready"
        happened.append(names)
        return [status(*names)]

    async def step(name: str) -> None:
        happened.append(name)

    endpoint = f"ipc://{tmp_path}/clients"
    with contextlib.closing(Gateway(endpoint, behaviour)):
        asyncio.run(
            restart(
                lambda: AsyncClient(endpoint),
                {"detokenizer.1"},
                lambda: step("stop"),
                lambda: step("start"),
            )
        )
    assert happened == [
        "stop",
        ["detokenizer.1", "detokenizer.2"],
        ["detokenizer.2"],
        "start",
        [],
        ["detokenizer.1"],
        "ready",
    ]


def test_a_report_before_the_end_of_a_worker_does_not_count(tmp_path: Path) -> None:
    """The report is requested when the worker has ended, and before its successor starts."""
    happened: list[str] = []

    def behaviour(request: Request) -> list[Reply]:
        assert isinstance(request, StatusRequest)
        happened.append("report" if request.fresh else "status")
        return [status()]

    async def step(name: str) -> None:
        happened.append(name)

    endpoint = f"ipc://{tmp_path}/clients"
    with contextlib.closing(Gateway(endpoint, behaviour)):
        names, steps = {"worker.1"}, (lambda: step("stop"), lambda: step("start"))
        asyncio.run(restart(lambda: AsyncClient(endpoint), names, *steps))
    assert happened == ["stop", "report", "status", "start", "status"]
