"""Attacks on the processes of a pipeline, their clocks and their files."""

import contextlib
import os
import signal
import threading
import time

import psutil

from penstock.launch.chaos.ground import Ground
from penstock.launch.pipeline.control_client import scale
from penstock.launch.pipeline.errors import LaunchError

BEHIND = """
import pathlib, runpy, sys, time
module, mark = sys.argv[1:]
if pathlib.Path(mark).exists():
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() - 3600
    time.time_ns = lambda: now_ns() - 3600 * 10**9
pathlib.Path(mark).touch()
runpy.run_module(module, run_name="__main__")
"""


def clocks(ground: Ground) -> None:
    """Gateway and scheduler restart with a clock an hour late."""
    for kind in ("gateway", "scheduler"):
        ground.kill(kind)
        ground.check()


def freeze(ground: Ground) -> None:
    """All processes are stopped for 8 s, as by a suspended virtual machine."""
    pids = [ground.supervisor.pid, *(one.pid for one in ground.processes())]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(8 if number == signal.SIGSTOP else 1)
    ground.check()


def blocked_output(ground: Ground) -> None:
    """Nobody reads what the supervisor writes, and processes die."""
    for kind in ("tokenizer", "detokenizer"):
        ground.kill(kind)
        ground.check()


def drain(ground: Ground) -> None:
    """Kill the gateway while the pipeline drains."""
    pid = ground.pid("gateway")
    ground.innocents.stop_asking()
    ground.supervisor.send_signal(signal.SIGTERM)
    os.kill(pid, signal.SIGKILL)


def config_removed(ground: Ground) -> None:
    """`config.json` is removed, and a process dies."""
    (ground.folder / "config.json").unlink()
    os.kill(_child(ground, "tokenizer"), signal.SIGKILL)
    ground.check()
    ground.processes()


def scales(ground: Ground) -> str:
    """Five changes of the number of tokenizers at once."""
    numbers: list[int] = []

    def change(number: int) -> None:
        with contextlib.suppress(LaunchError):
            numbers.append(scale(ground.name, "tokenizer", number))

    threads = [threading.Thread(target=change, args=(1 + n % 3,)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = sum(one.name.startswith("tokenizer.") for one in ground.processes())
    wrong = "" if sorted(numbers) == [1, 1, 2, 2, 3] and found in numbers else "WRONG: "
    return f"{wrong}{found} run, reported {numbers}"


def _child(ground: Ground, kind: str) -> int:
    """As `Ground.pid`, without the run folder."""
    for one in ground.supervisor.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if f"penstock.services.{kind}" in " ".join(one.cmdline()):
                return int(one.pid)
    raise LaunchError(f"no {kind} runs")
