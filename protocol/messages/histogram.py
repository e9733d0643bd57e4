"""Histograms of the metrics."""

from bisect import bisect_left

from msgspec import Struct


class Histogram(Struct, kw_only=True):
    """Counts of values up to each bound, as in Prometheus."""

    bounds: list[float]  # ascending; seconds or tokens
    # [len(bounds) + 1]: of values in each interval, not summed; the last is beyond all bounds
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def of(cls, bounds: list[float]) -> "Histogram":
        return cls(bounds=bounds, counts=[0] * (len(bounds) + 1))

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value
