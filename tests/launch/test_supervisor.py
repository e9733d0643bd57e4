"""The supervisor, with processes of a line each and no gateway."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.launch import supervisor as module
from penstock.launch.running import claim
from penstock.launch.supervisor import MAX_EARLY_DEATHS, Supervisor
from penstock.protocol.config import Config, run_folder

CONFIG = Config(name="x", endpoint="ipc://nowhere", tp=2)
Supervise = Callable[..., int]


@pytest.fixture
def supervise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Supervise:
    """Runs these commands to their end; `act` is called when the first line is printed."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def run(act: Callable[[], None] = lambda: None, **commands: str) -> int:
        supervisor = Supervisor(CONFIG, commands, max_deaths=5)
        write = supervisor._write

        def write_and_act(text: str) -> None:
            nonlocal act
            write(text)
            act()
            act = lambda: None  # noqa: E731

        supervisor._write = write_and_act  # type: ignore[method-assign]
        with claim(CONFIG):
            return asyncio.run(asyncio.wait_for(supervisor.run(), 20))

    return run


def stop_by(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything(supervise: Supervise, number: int) -> None:
    before = signal.getsignal(number)
    assert supervise(stop_by(number), worker="sh -c 'echo up; exec sleep 60'") == 0
    assert signal.getsignal(number) in (before, signal.SIG_DFL)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    assert not run_folder("x").exists()


def test_the_worker_line_runs_tp_times_with_its_environment(
    supervise: Supervise, capsys: pytest.CaptureFixture[str]
) -> None:
    code = 'echo $PENSTOCK_PROCESS $PENSTOCK_CONFIG "${PATH%%:*}"; exit 3'
    assert supervise(worker=f"sh -c '{code}'") == 1
    folder, path = run_folder("x"), Path(sys.executable).parent
    printed = capsys.readouterr().out.splitlines()
    for name in ("worker.1", "worker.2"):
        assert f"{name}      | {name} {folder}/config.json {path}" in printed


def test_a_process_that_never_lives_ends_the_pipeline(
    supervise: Supervise, capsys: pytest.CaptureFixture[str]
) -> None:
    assert supervise(tokenizer="sh -c 'seq 9000 >&2; exit 3'") == 1
    printed = capsys.readouterr()
    assert printed.err == (
        f"launch: tokenizer.1 died {MAX_EARLY_DEATHS} times before it was ready, the last time "
        "with exit code 3; the pipeline stops. Its last lines:\n"
        + "".join(f"  {number}\n" for number in range(8991, 9001))
    )
    assert printed.out.count("tokenizer.1   | ") == 9000 * MAX_EARLY_DEATHS
    assert printed.out.count("launch        | tokenizer.1 died with exit code 3; restarted\n") == 2


def test_what_does_not_stop_is_killed(
    supervise: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE", 0.3)
    stubborn = "sh -c 'trap \"\" TERM; echo up; while :; do sleep 1; done'"
    assert supervise(stop_by(signal.SIGTERM), tokenizer=stubborn) == 0
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
