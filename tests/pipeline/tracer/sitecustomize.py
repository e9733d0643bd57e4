"""Tracer of a process: which files run code in which phase.

A process that starts with this folder in `PYTHONPATH` appends a line `PHASE FILE` to a file of its
own in the folder `PENSTOCK_TRACE` when code of the file runs for the first time in a phase. The
phase is the first byte of the file `phase` there.
"""

import mmap
import os
import sys
import threading
from pathlib import Path
from types import FrameType

FOLDER = Path(os.environ["PENSTOCK_TRACE"])
with (FOLDER / "phase").open("rb") as _file:
    PHASE = mmap.mmap(_file.fileno(), 1, prot=mmap.PROT_READ)
CALLS = (FOLDER / f"{os.getpid()}.calls").open("a", buffering=1)
_seen: set[tuple[int, str]] = set()


def note(frame: FrameType, event: str, _: object) -> None:
    """Write down the first call in each file and phase."""
    if event == "call" and (call := (PHASE[0], frame.f_code.co_filename)) not in _seen:
        _seen.add(call)
        CALLS.write(f"{call[0]} {call[1]}\n")


threading.setprofile(note)
sys.setprofile(note)
