"""Tracer of a process: which functions run in which phase.

A process that starts with this folder in `PYTHONPATH` appends a line `PHASE LINES FILE` to a file
of its own in the folder `PENSTOCK_TRACE` when a function is called for the first time in a phase:
the function's lines with instructions, and its file. The phase is the first byte of the file
`phase` there.
"""

import mmap
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

FOLDER = Path(os.environ["PENSTOCK_TRACE"])
with (FOLDER / "phase").open("rb") as _file:
    PHASE = mmap.mmap(_file.fileno(), 1, prot=mmap.PROT_READ)
CALLS = (FOLDER / f"{os.getpid()}.calls").open("a", buffering=1)
_seen: set[tuple[int, CodeType]] = set()


def note(frame: FrameType, event: str, _: object) -> None:
    """Write down the first call of each function and phase."""
    if event == "call" and (call := (PHASE[0], code := frame.f_code)) not in _seen:
        _seen.add(call)
        lines = sorted({line for _, _, line in code.co_lines() if line})
        CALLS.write(f"{call[0]} {','.join(map(str, lines))} {code.co_filename}\n")


threading.setprofile(note)
sys.setprofile(note)
