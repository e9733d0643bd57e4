"""The parts of a start."""

import inspect
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.services.worker.timings import StartTimes, _started_at


def test_parts_follow_one_another_from_the_start_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = StartTimes()
    start = times._last
    moments = iter([start + 1.25, start + 3.5])
    monkeypatch.setattr(time, "time", lambda: next(moments))
    times.end("group")
    times.end("weights")
    assert str(times) == "3.50 s (group 1.25, weights 2.25)"


def test_the_start_is_right_to_a_tick_of_the_clock() -> None:
    # without importing torch, which takes long
    imports = "import os, time, psutil\nfrom pathlib import Path\n"
    code = f"{imports}{inspect.getsource(_started_at)}print(_started_at())"
    before = time.time()
    started = float(subprocess.check_output([sys.executable, "-P", "-c", code]))
    tick = 1 / os.sysconf("SC_CLK_TCK") if Path("/proc").exists() else 1.0
    assert before - 2 * tick <= started <= time.time()
