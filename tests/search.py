"""Sizes of searches: `PENSTOCK_SEARCH=1` is the full search of `make test-long`."""

import os

FACTOR = float(os.environ.get("PENSTOCK_SEARCH", "0.25"))
"""the part of a full search; `make test` runs a quarter"""


def scaled(number: int) -> int:
    """Return the number of examples to try where a full search tries `number`."""
    return max(1, round(number * FACTOR))
