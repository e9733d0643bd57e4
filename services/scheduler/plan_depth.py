"""How many plans to keep in flight."""

import math
import statistics
from collections import deque

LEAST = 2
"""the GPU waits for the host with fewer, however long a step takes"""
ROUND_TRIP = 2.5e-3
"""seconds from a step's end until a plan that follows from its tokens is launched, at the worst:
between the processes 1.1 ms at the 90th percentile, for sleeping threads wake late; 0.25 ms of
launch"""


class PlanDepth:
    """As many plans as run while one makes its round trip, from the pace at which tokens come.

    More would only make new requests wait longer for their first step.
    """

    def __init__(self, most: int) -> None:
        self.num_plans = min(LEAST, most)
        self._most = most
        self._last = -math.inf
        self._seconds = deque([math.inf] * 3, maxlen=3)
        """between the tokens of one step and of the next; their median forgives one that is late"""

    def tokens_came(self, now: float) -> None:
        """Those of one step; `now` in seconds."""
        self._seconds.append(now - self._last)
        self._last = now
        step = max(statistics.median(self._seconds), ROUND_TRIP / self._most)
        self.num_plans = min(max(1 + math.ceil(ROUND_TRIP / step), LEAST), self._most)
