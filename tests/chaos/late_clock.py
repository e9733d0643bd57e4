"""A process whose clock is an hour late once it is restarted: `late_clock.py FOLDER MODULE`.

FOLDER remembers the processes that were started before.
"""

import os
import runpy
import sys
import time
from pathlib import Path

HOUR = 3600


def set_back(seconds: int) -> None:
    """Set the wall clock back; nobody sets the clock that counts from the machine's start."""
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() - seconds
    time.time_ns = lambda: now_ns() - seconds * 1_000_000_000


if __name__ == "__main__":
    seen = Path(sys.argv[1], os.environ["PENSTOCK_PROCESS"])
    if seen.exists():
        set_back(HOUR)
    seen.touch()
    runpy.run_module(sys.argv[2], run_name="__main__")
