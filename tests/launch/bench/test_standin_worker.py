"""The worker that takes no time."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penstock.launch.bench.standin_worker import StandInWorker
from penstock.protocol.messages.packed import pack, unpack
from penstock.protocol.messages.plan import BatchPlan, RowAdded, SampledTokens
from penstock.protocol.messages.worker import WorkerAssignment
from penstock.protocol.transport.context import Context


def test_a_place_that_is_told_again_changes_nothing(tmp_path: Path) -> None:
    """The scheduler does so every half second."""
    context = Context()
    at = SimpleNamespace(workers=f"ipc://{tmp_path}/workers", supervisor="")
    worker = StandInWorker(
        SimpleNamespace(
            name="worker.1", identity=b"w", context=context, endpoints=at, log=logging.getLogger()
        )  # type: ignore[arg-type]
    )
    said: list[Any] = []
    worker.plans.send = said.append  # type: ignore[assignment,method-assign]
    row = RowAdded(0, pack([1, 2]), pack([0]), 0)
    place = WorkerAssignment(7, "g", 0, 1, "")
    heard = [place, BatchPlan(7, 0, added=[row], chunks=pack([0, 2])), place, BatchPlan(7, 1)]
    worker.plans.receive = lambda: iter([(b"", one) for one in heard])  # type: ignore
    worker.on_messages()
    context.destroy(linger=0)
    tokens = [one for one in said if isinstance(one, SampledTokens)]
    assert [len(unpack(one.token_ids)) for one in tokens] == [1, 1]
