"""Figures of the runs of `launch bench serve`."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.launch.bench.measure import Run
from penstock.launch.bench.streams import Stamps, as_streaming

Load = tuple[Run, Sequence[Stamps]]
"""one run, and its requests in the order of their times; those that failed have none"""


def summary(
    loads: Sequence[Load], times: Sequence[float], goodput: Mapping[str, float]
) -> dict[str, Any]:
    """Return the median of each figure, by vLLM's names, and the runs.

    `times`: when requests should have left; `goodput`: milliseconds that a good one keeps to.
    """
    runs = [_figures(run, stamps, times, goodput) for run, stamps in loads]
    medians = {
        name: type(runs[0][name])(statistics.median(run[name] for run in runs)) for name in runs[0]
    }
    return {**medians, "runs": runs}


def _figures(
    run: Run, stamps: Sequence[Stamps], times: Sequence[float], goodput: Mapping[str, float]
) -> dict[str, Any]:
    num_good = sum(bool(one.times) and one.is_good(goodput) for one in stamps)
    return {
        **msgspec.structs.asdict(run),
        **arrivals([one.start for one in stamps], times),
        "request_goodput": num_good / run.duration if goodput else math.nan,
        **msgspec.structs.asdict(as_streaming(stamps)),
    }


def arrivals(starts: Sequence[float], times: Sequence[float]) -> dict[str, float]:
    """Return the achieved rate (NaN for one request) and the delay of the latest request.

    A client that is too slow shows in the delay.
    """
    sent = [start - starts[0] for start in starts]
    late = max(s - t for s, t in zip(sent, times, strict=True))
    rate = (len(sent) - 1) / sent[-1] if len(sent) > 1 else math.nan
    return {"sent_per_second": rate, "latest_send_ms": late * 1e3}
