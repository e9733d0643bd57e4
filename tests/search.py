"""Sizes of searches: `PENSTOCK_SEARCH=N` tries N times as many examples as `make test`."""

import os

FACTOR = int(os.environ.get("PENSTOCK_SEARCH", "1"))


def scaled(number: int) -> int:
    """Return how many examples to try where `make test` tries `number`."""
    return number * FACTOR
