"""The supervisor, with processes of a line each and no gateway."""

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from penstock.launch.pipeline.run_folder import claim
from penstock.launch.supervisor import local, output
from penstock.launch.supervisor.supervisor import MAX_EARLY_DEATHS, Supervisor
from penstock.protocol.config import Config, run_folder, write_config
from penstock.protocol.transport.process import PROCESS_VARIABLE
from tests.launch.supervised import Known
from tests.launch.supervisor.conftest import CONFIG, Supervise

pytestmark = pytest.mark.slow

GATEWAY = (
    f'{sys.executable} -P -c "import os, signal, zmq; '
    "from penstock.protocol.transport.process import *; "
    "from penstock.protocol.messages.pipeline import ToGateway; "
    "p = Process('x'); r = p.context.bind(zmq.PULL, p.endpoints.results, ToGateway); "
    "print(1, flush=True); "
    'any(m.draining for m in iter(lambda: r.socket.poll() and next(r.receive())[1], 0)); %s"'
)
"""a gateway that has got its line out, and, when it has heard of the drain, does something"""


def untimed(out: str) -> list[str]:
    """Return lines without the times that the supervisor's own have."""
    return re.sub(r"\| \d\d-\d\d \d\d:\d\d:\d\d\.\d{3} ", "| ", out).splitlines()


def stop_by(*numbers: int) -> Callable[[], None]:
    def act() -> None:
        for number in numbers:
            os.kill(os.getpid(), number)

    return act


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything(supervise: Supervise, number: int) -> None:
    before = signal.getsignal(number)
    assert supervise(stop_by(number), worker="sh -c 'echo up; exec sleep 60'") == 0
    assert signal.getsignal(number) in (before, signal.SIG_DFL)
    assert not run_folder("x").exists()


def test_the_worker_line_runs_tp_times_with_its_environment(
    supervise: Supervise, capfd: pytest.CaptureFixture[str]
) -> None:
    code = 'echo $PENSTOCK_PROCESS $PENSTOCK_CONFIG "${PATH%%:*}"; exit 3'
    assert supervise(worker=f"sh -c '{code}'") == 1
    folder, path = run_folder("x"), Path(sys.executable).parent
    printed = capfd.readouterr().out.splitlines()
    for name in ("worker.1", "worker.2"):
        assert f"{name}      | {name} {folder}/config.json {path}" in printed


@pytest.mark.parametrize(
    ("code", "how"), [("exit 3", "exit code 3"), ("kill -9 $$", "signal 9")], ids=["exit", "kill"]
)
def test_a_process_that_never_lives_ends_the_pipeline(
    supervise: Supervise, capfd: pytest.CaptureFixture[str], code: str, how: str
) -> None:
    assert supervise(tokenizer=f"sh -c 'seq 9000 >&2; {code}'") == 1
    printed = capfd.readouterr()
    assert printed.err == (
        f"launch: tokenizer.1 died {MAX_EARLY_DEATHS} times before it was ready, the last time "
        f"with {how}; the pipeline stops. Its last lines:\n"
        + "".join(f"  {number}\n" for number in range(8991, 9001))
    )
    assert printed.out.count("tokenizer.1   | ") == 9000 * MAX_EARLY_DEATHS
    died = f"launch        | tokenizer.1 died with {how}; restarted"
    assert untimed(printed.out).count(died) == 2


def test_a_checkpoint_that_can_not_be_served_is_not_tried_again(
    supervise: Supervise, capfd: pytest.CaptureFixture[str]
) -> None:
    code = f"echo 11-26 10:37:41.835 E tokenizer.json: got x, expected y >&2; exit {os.EX_CONFIG}"
    assert supervise(tokenizer=f"sh -c '{code}'") == 2
    printed = capfd.readouterr()
    assert printed.err == "launch: tokenizer.1: tokenizer.json: got x, expected y\n"
    assert printed.out.count("tokenizer.1   | ") == 1


def test_what_does_not_stop_is_killed(
    supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "GRACE", 0.3)
    stubborn = "sh -c 'trap \"\" TERM; echo up; while :; do sleep 1; done'"
    assert supervise(stop_by(signal.SIGTERM), tokenizer=stubborn) == 0


def test_json_lines(supervise: Supervise, capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever is printed, also of what ends the pipeline."""
    config = msgspec.structs.replace(CONFIG, log_format="json")
    assert supervise(config=config, tokenizer="sh -c 'echo up; exit 3'") == 1
    printed = capfd.readouterr()
    lines = [json.loads(line) for line in printed.out.splitlines()]
    assert [(one["process"], one["message"]) for one in lines] == [
        ("tokenizer.1", "up"),
        ("launch", "tokenizer.1 died with exit code 3; restarted"),
    ] * (MAX_EARLY_DEATHS - 1) + [("tokenizer.1", "up")]
    assert "tokenizer.1 died 3 times" in json.loads(printed.err)["message"]


def test_output_that_nobody_reads_holds_nothing_up(
    supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that die are restarted, and the pipeline ends when it is to."""
    monkeypatch.setattr(output, "LAST_SECONDS", 0.0)
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as lines, os.fdopen(writer, "w") as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        assert supervise(tokenizer="sh -c 'seq 50000; exit 3'") == 1
        assert lines.readline() == b"tokenizer.1   | 1\n"


def test_files_that_are_removed_from_the_run_folder_are_made_again(
    supervise: Supervise, tmp_path: Path
) -> None:
    """The next process of that name reads its configuration, and ends the test."""

    def act() -> None:
        for path in run_folder("x").iterdir():
            if path.name != "lock":
                path.unlink()
        children = psutil.Process().children()
        (child,) = (one for one in children if PROCESS_VARIABLE in one.environ())
        child.kill()

    # a third one may begin before the signal is handled: it changes nothing
    read = f'cat "$PENSTOCK_CONFIG" > {tmp_path}/3; mv {tmp_path}/3 {tmp_path}/2'
    read = f"mkdir {tmp_path}/1 && echo && exec sleep 60; {read}"
    assert supervise(act, tokenizer=f"sh -c '{read}; kill -TERM $PPID'") == 0
    assert msgspec.json.decode((tmp_path / "2").read_bytes(), type=Config) == CONFIG


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_gateway_ends_before_the_others(
    supervise: Supervise, capfd: pytest.CaptureFixture[str], tmp_path: Path, is_killed: bool
) -> None:
    """One that is killed in a drain is restarted."""
    once = (
        f"os.path.exists('{tmp_path}/1') or open('{tmp_path}/1', 'x') and os.kill(os.getpid(), 9)"
    )
    gateway = GATEWAY % (once if is_killed else "print(2)")
    number = signal.SIGTERM if is_killed else signal.SIGINT
    assert supervise(stop_by(number), gateway=gateway, worker="sleep 60") == 0
    last = ["launch        | gateway.1 died with signal 9; restarted", "gateway.1     | 1"]
    assert untimed(capfd.readouterr().out) == [
        "gateway.1     | 1",
        "launch        | no new requests; open ones have 30 s, or until the next signal",
        *(last if is_killed else ["gateway.1     | 2"]),
    ]


@pytest.mark.parametrize(
    ("numbers", "drain_timeout"),
    [
        ([signal.SIGTERM, signal.SIGINT], 3600),
        ([signal.SIGHUP], 3600),
        ([signal.SIGTERM], 0),
        ([signal.SIGTERM], 0.01),
    ],
)
def test_what_ends_a_drain(supervise: Supervise, numbers: list[int], drain_timeout: float) -> None:
    config = msgspec.structs.replace(CONFIG, drain_timeout=drain_timeout)
    gateway = GATEWAY % "signal.pause()"
    assert supervise(stop_by(*numbers), config, gateway=gateway) == 0


def test_a_kill_with_the_group_is_not_a_death(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Failures of one rank end nothing but that rank's own processes."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    supervisor, said = Supervisor(CONFIG, {"worker": ""}, max_deaths=3), list[str]()
    monkeypatch.setattr(supervisor, "say", said.append)
    worker = Known("worker.2", SimpleNamespace(pid=1))
    with claim(CONFIG):
        write_config(CONFIG)
        assert supervisor.may_spawn(worker)
        for pid in range(1, 21):
            worker.last_pid = worker.killed_with_group = pid
            assert supervisor.may_spawn(worker)
        worker.last_pid, worker.end = 21, "signal 11"
        assert supervisor.may_spawn(worker), "the first death of its own"
    assert said == ["worker.2 restarted with its group"] * 20 + [
        "worker.2 died with signal 11; restarted"
    ]
