"""When a restarted process counts as back, against a gateway that says what the test wants."""

import contextlib
from collections.abc import Iterable
from pathlib import Path

from penstock.launch.supervisor.control_server import restart
from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.messages.client import Reply, Request, StatusRequest
from penstock.protocol.messages.status import SchedulerStatus, StatusReply
from tests.launch.fake_gateway import STATUS, Gateway


async def restarted(folder: Path, name: str, reports: Iterable[list[str]]) -> list[object]:
    """Return what happens: steps, and the detokenizers of reports that the gateway gives."""
    left, happened = iter(reports), list[object]()

    def behaviour(request: Request) -> list[Reply]:
        assert isinstance(request, StatusRequest)
        names = next(left) if request.fresh else []
        happened.append(names if request.fresh else "status")
        scheduler = SchedulerStatus(epoch=1, ready=True, detokenizers=dict.fromkeys(names, 0))
        return [StatusReply(ready=True, **STATUS | {"schedulers": [scheduler]})]

    async def step(what: str) -> None:
        happened.append(what)

    endpoint = f"ipc://{folder}/clients"
    with contextlib.closing(Gateway(endpoint, behaviour)):
        steps = (lambda: step("stop"), lambda: step("start"))
        await restart(lambda: AsyncClient(endpoint), {name}, *steps)
    return happened


async def test_a_predecessor_is_not_taken_for_its_successor(tmp_path: Path) -> None:
    """A process starts when the other's name is removed, and is back when its own name is there."""
    reports = [["detokenizer.1", "detokenizer.2"], ["detokenizer.2"], [], ["detokenizer.1"]]
    happened = await restarted(tmp_path, "detokenizer.1", reports)
    assert happened == ["stop", *reports[:2], "start", *reports[2:], "status"]


async def test_a_report_before_the_end_of_a_worker_does_not_count(tmp_path: Path) -> None:
    """The report is requested when the worker has ended, and before its successor starts."""
    happened = await restarted(tmp_path, "worker.1", [["detokenizer.1"]])
    assert happened == ["stop", ["detokenizer.1"], "status", "start", "status"]
