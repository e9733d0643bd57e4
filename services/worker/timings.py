"""Measurements of a worker: startup times, idle times of the GPU, and traces of steps."""

import logging
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.profiler import ProfilerActivity, profile, schedule

log = logging.getLogger(__name__)
WINDOW = 1024  # number of idle times in the percentiles
FIRST_STEP = 100  # first step of a trace, after one-time work


class StartTimes:
    """The seconds of each part of the startup, since the creation of the process."""

    def __init__(self) -> None:
        self._parts: dict[str, float] = {}
        self._last = _started_at()

    def end(self, part: str) -> None:
        """End a part of the startup. The next part begins."""
        now = time.time()
        self._parts[part] = now - self._last
        self._last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in self._parts.items())
        return f"{sum(self._parts.values()):.2f} s ({parts})"


class IdleTimes:
    """The idle times of the GPU between two steps of the same sequences.

    Two events surround each step. The host reads the events when both have passed, so it does not
    wait. The first event precedes the step's copy and launch, so GPU time that waits for copy and
    launch is not counted.
    """

    def __init__(self) -> None:
        self._last_end: Any = None
        self._begin: Any = None
        # (end event of a step, start event of the next step), not yet measured
        self._gaps: deque[tuple[Any, Any]] = deque()
        self._microseconds: deque[float] = deque(maxlen=WINDOW)

    def begin(self, *, follows: bool) -> None:
        """Record the start of a step, and whether it `follows` the rows of the last step."""
        self._begin = _event()
        if follows and self._last_end is not None:
            self._gaps.append((self._last_end, self._begin))

    def end(self) -> tuple[Any, Any]:
        """Record the end of a launched step. Return the events of its beginning and its end."""
        self._last_end = _event()
        while len(self._gaps) > 1 and self._gaps[0][1].query():
            end, begin = self._gaps.popleft()
            self._microseconds.append(end.elapsed_time(begin) * 1000)
        return self._begin, self._last_end

    def percentiles(self) -> tuple[float, float]:
        """Return the median and 99th percentile in microseconds; 0 without measurements."""
        if not self._microseconds:
            return 0.0, 0.0
        ordered = sorted(self._microseconds)
        return ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]


def _started_at() -> float:
    """Return when this process was created, in seconds since 1970 (psutil may be 1 s off)."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return float(psutil.Process().create_time())
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)


def _event() -> Any:
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def step_profiler(num_steps: int, path: Path) -> profile:
    """Start a torch profiler, whose `step` must be called before every step.

    The trace, for chrome://tracing or https://ui.perfetto.dev, is written to `path` when complete.
    """

    def write(profiler: profile) -> None:
        profiler.export_chrome_trace(str(path))
        log.info("wrote the trace of %d steps to %s", num_steps, path)

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(
        activities=activities,
        schedule=schedule(wait=FIRST_STEP - 2, warmup=2, active=num_steps, repeat=1),
        on_trace_ready=write,
    )
    profiler.start()
    return profiler
