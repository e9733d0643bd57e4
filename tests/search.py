"""Sizes of searches and matrices: `make test-long` has all of them, `make test` a part.

`PENSTOCK_SEARCH=1` is the full search.
"""

import os
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest
from _pytest.mark import ParameterSet

FACTOR = float(os.environ.get("PENSTOCK_SEARCH", "0.25"))
"""the part of a full search; `make test` runs a quarter"""


def scaled(number: int) -> int:
    """Return the number of examples to try where a full search tries `number`."""
    return max(1, round(number * FACTOR))


def in_long(*values: Any) -> ParameterSet:
    """Return a parameter that `make test` leaves out: another one takes most of the same code."""
    return pytest.param(*values, marks=pytest.mark.long)


def diagonal(*axes: Iterable[Any]) -> list[ParameterSet]:
    """Return all combinations of some axes' values, as parameters.

    `make test` runs one in n of them, n being the length of the second longest axis: each value is
    among them. The others are for `make test-long`.
    """
    lists = [list(axis) for axis in axes]
    step = sorted(map(len, lists))[-2]
    combinations = product(*map(enumerate, lists))
    return [
        pytest.param(
            *(value for _, value in one),
            marks=() if sum(at for at, _ in one) % step == 0 else pytest.mark.long,
        )
        for one in combinations
    ]
