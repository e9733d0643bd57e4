"""Attacks on the processes of a pipeline, their clocks and their files."""

import contextlib
import os
import signal
import threading
import time

import psutil

from penstock.launch.chaos.victim import Attack, Victim
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
LATE_CLOCKS = {kind: (BEHIND, f"penstock.services.{kind}") for kind in ("gateway", "scheduler")}


@Attack("clock an hour late", programs=LATE_CLOCKS)
def clocks(victim: Victim) -> None:
    """Gateway and scheduler restart with a clock an hour late."""
    for kind in ("gateway", "scheduler"):
        victim.kill(kind)
        victim.check()


@Attack("freeze of 8 s")
def freeze(victim: Victim) -> None:
    """All processes are stopped for 8 s, as by a suspended virtual machine."""
    pids = [victim.supervisor.pid, *(one.pid for one in victim.processes())]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(8 if number == signal.SIGSTOP else 1)
    victim.check()


@Attack("blocked output", is_output_blocked=True)
def blocked_output(victim: Victim) -> None:
    """Nobody reads what the supervisor writes, and processes die."""
    for kind in ("tokenizer", "detokenizer"):
        victim.kill(kind)
        victim.check()


@Attack("gateway killed in a drain", ends=True)
def drain(victim: Victim) -> None:
    """Kill the gateway while the pipeline drains."""
    pid = victim.pid("gateway")
    victim.innocents.stop_sending()
    victim.supervisor.send_signal(signal.SIGTERM)
    os.kill(pid, signal.SIGKILL)


@Attack("config.json removed")
def config_removed(victim: Victim) -> None:
    """`config.json` is removed, and a process dies."""
    (victim.config.run_folder / "config.json").unlink()
    os.kill(_child(victim, "tokenizer"), signal.SIGKILL)
    victim.check()
    victim.processes()


@Attack("five scales")
def scales(victim: Victim) -> str:
    """Five changes of the number of tokenizers at once."""
    numbers: list[int] = []

    def change(number: int) -> None:
        with contextlib.suppress(LaunchError):
            numbers.append(scale(victim.config.name, "tokenizer", number))

    threads = [threading.Thread(target=change, args=(1 + n % 3,)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = sum(one.name.startswith("tokenizer.") for one in victim.processes())
    wrong = "" if sorted(numbers) == [1, 1, 2, 2, 3] and found in numbers else "WRONG: "
    return f"{wrong}{found} run, reported {numbers}"


def _child(victim: Victim, kind: str) -> int:
    """As `Ground.pid`, without the run folder."""
    for one in victim.supervisor.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if one.cmdline()[:1] and one.cmdline()[0].startswith(f"penstock::{kind}."):
                return int(one.pid)
    raise LaunchError(f"no {kind} runs")
