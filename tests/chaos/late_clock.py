"""`python -P late_clock.py FOLDER MODULE`: a process whose clock is an hour behind when it is
restarted. FOLDER remembers which ones have been started before."""

import os
import runpy
import sys
import time
from pathlib import Path

HOUR = 3600


def set_back(seconds: int) -> None:
    """The wall clock only: what counts seconds since the machine's start is not set by anybody."""
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() - seconds
    time.time_ns = lambda: now_ns() - seconds * 1_000_000_000


if __name__ == "__main__":
    seen = Path(sys.argv[1], os.environ["PENSTOCK_PROCESS"])
    if seen.exists():
        set_back(HOUR)
    seen.touch()
    runpy.run_module(sys.argv[2], run_name="__main__")
