"""The parts of a start."""

import os
import subprocess
import sys
import time
from pathlib import Path

from penstock.services.worker.timings import StartTimes


def test_parts_follow_one_another_from_the_start_of_the_process() -> None:
    times = StartTimes()
    start = times._last
    times.end("imports", start + 1.25)
    times.end("weights", start + 3.5)
    assert str(times) == "3.50 s (imports 1.25, weights 2.25)"


def test_what_was_imported_before_the_start_took_no_time() -> None:
    times = StartTimes()
    times.end("imports", times._last - 100)
    assert str(times) == "0.00 s (imports 0.00)"


def test_the_start_is_right_to_a_tick_of_the_clock() -> None:
    code = "from penstock.services.worker.timings import _started_at; print(_started_at())"
    before = time.time()
    started = float(subprocess.check_output([sys.executable, "-P", "-c", code]))
    tick = 1 / os.sysconf("SC_CLK_TCK") if Path("/proc").exists() else 1.0
    assert before - 2 * tick <= started <= time.time()
