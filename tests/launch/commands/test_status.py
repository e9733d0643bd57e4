"""The table of `launch status`."""

from typing import Any

import msgspec
import pytest

from penstock.launch.commands import status as status_command
from penstock.launch.commands.status import as_json, as_text
from penstock.protocol.config import Config
from penstock.protocol.messages.status import ProcessStatus, SchedulerStatus, StatusReply
from tests.launch.conftest import Launch
from tests.launch.fake_gateway import STATUS

PROCESSES = [
    ProcessStatus(name="gateway.1", pid=10, uptime=3725.0, restarts=0),
    ProcessStatus(name="tokenizer.1", pid=11, uptime=59.9, restarts=2),
    ProcessStatus(name="worker.1", pid=12, uptime=0.0, restarts=0),
]
BUSY = {"num_requests": 5, "tokenizers": {"tokenizer.1": 4}, "num_bad_frames": 1}
GATEWAY = StatusReply(ready=True, **STATUS | BUSY)


def status(gateway: StatusReply | None) -> dict[str, Any]:
    return {"config": Config(), "processes": PROCESSES, "gateway": gateway}


def test_a_running_pipeline() -> None:
    scheduler = SchedulerStatus(
        epoch=1, ready=True, num_waiting=7, num_running=3, num_blocks=200, num_free_blocks=50
    )
    scheduler.workers = ["worker.1"]
    GATEWAY.schedulers = [scheduler]
    assert as_text(status(GATEWAY)).splitlines() == [
        "default: ready, Qwen3 demo on tcp://127.0.0.1:5555",
        "",
        "process              pid    uptime restarts requests",
        "gateway.1             10   1:02:05        0        5",
        "tokenizer.1           11   0:00:59        2        4",
        "worker.1              12   0:00:00        0        -",
        "",
        "waiting   7",
        "running   3",
        "KV blocks 150 of 200 in use (75%)",
        "steps     0, preemptions 0",
        "dropped   1 bad frames",
    ]
    assert '"num_waiting": 7' in as_json(status(GATEWAY))


def test_workers_that_wait_are_spare() -> None:
    gateway = msgspec.structs.replace(GATEWAY)
    gateway.schedulers = [SchedulerStatus(epoch=1, ready=True, workers=["worker.2"])]
    assert "worker.1              12   0:00:00        0    spare" in as_text(status(gateway))
    worker = msgspec.structs.replace(PROCESSES[2], counters={"standby_ready": 1.0})
    text = as_text(status(gateway) | {"processes": [worker]})
    assert "worker.1              12   0:00:00        0  standby" in text
    gateway.ready = False
    assert "spare" not in as_text(status(gateway))


def test_the_nodes_are_shown_where_there_are_several() -> None:
    on_nodes = {"processes": [msgspec.structs.replace(one, node="gpu1") for one in PROCESSES]}
    lines = as_text(status(GATEWAY) | on_nodes).splitlines()
    assert lines[3] == "gateway.1@gpu1         10   1:02:05        0        5"
    assert lines[4] == "tokenizer.1@gpu1       11   0:00:59        2        4"


def test_the_waits_of_a_gpu_are_shown() -> None:
    GATEWAY.schedulers = [SchedulerStatus(epoch=1, ready=True, gpu_idle_us=(1.25, 40.0))]
    assert "preemptions 0, GPU idle between them 1.2 µs (p99 40.0)" in as_text(status(GATEWAY))


def test_replicas_are_shown_together_and_each() -> None:
    detokenizers = {"detokenizer.1": 2, "detokenizer.2": 0}
    some = {"num_blocks": 100, "num_free_blocks": 40, "detokenizers": detokenizers}
    first = SchedulerStatus(epoch=1, ready=True, num_running=3, workers=["worker.1"], **some)
    GATEWAY.schedulers = [
        first,
        msgspec.structs.replace(first, ready=False, replica=1, num_running=1, workers=[]),
    ]
    merged = GATEWAY.scheduler
    assert merged
    assert merged.detokenizers == {"detokenizer.1": 4, "detokenizer.2": 0}
    assert (GATEWAY.all_serve, merged.ready, merged.workers) == (True, False, ["worker.1"])
    assert as_text(status(GATEWAY)).splitlines()[7:] == [
        "waiting   0",
        "running   4",
        "KV blocks 120 of 200 in use (60%)",
        "steps     0, preemptions 0",
        "dropped   1 bad frames",
        "replica 0 ready: waiting 0, running 3, KV blocks 60%, steps 0, worker.1",
        "replica 1 not ready: waiting 0, running 1, KV blocks 60%, steps 0",
    ]


def test_a_gateway_that_does_not_answer() -> None:
    text = as_text(status(None))
    assert text.startswith("default: not ready, Qwen3 demo on")
    assert text.endswith("the gateway does not answer")
    assert '"gateway": null' in as_json(status(None))


def test_the_exit_code_says_whether_it_is_ready(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting = msgspec.structs.replace(GATEWAY, ready=False)
    for gateway, code in ((GATEWAY, 0), (starting, 1), (None, 1)):
        monkeypatch.setattr(status_command, "read_status", lambda _, one=gateway: status(one))
        launch("status", code=code)
