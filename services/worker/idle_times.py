"""How long the GPU waits between two steps of the same sequences."""

from collections import deque
from typing import Any

import numpy as np
import torch

WINDOW = 1024
"""steps that the figures are of"""


class IdleTimes:
    """Two events around each step; read when both are in the past, so nothing waits for them.

    A step's first event comes before its copy and launch: what the GPU waits for these, where the
    host is late, is not counted.
    """

    def __init__(self) -> None:
        self._last_end: Any = None
        self._begin: Any = None
        self._gaps: deque[tuple[Any, Any]] = deque()
        """(end of a step, begin of the next), not yet measured"""
        self._microseconds: deque[float] = deque(maxlen=WINDOW)

    def begin(self, *, follows: bool) -> None:
        """A step is about to be launched; `follows`: it goes on with rows of the one before."""
        self._begin = _event()
        if follows and self._last_end is not None:
            self._gaps.append((self._last_end, self._begin))

    def end(self) -> Any:
        """All of the step is launched. Returns the event of its end."""
        self._last_end = _event()
        while len(self._gaps) > 1 and self._gaps[0][1].query():
            end, begin = self._gaps.popleft()
            self._microseconds.append(end.elapsed_time(begin) * 1000)
        return self._last_end

    def percentiles(self) -> tuple[float, float]:
        """Median and 99th percentile in microseconds; 0 before there are any."""
        if not self._microseconds:
            return 0.0, 0.0
        median, p99 = np.percentile(self._microseconds, [50, 99])
        return float(median), float(p99)


def _event() -> Any:
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
