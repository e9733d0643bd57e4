"""Numbers of the command line, each within its limits."""

import math
from argparse import ArgumentTypeError

GOODPUT = ("ttft", "tpot", "e2el")


def limit(text: str) -> tuple[str, float]:
    """Parse a latency and its limit in milliseconds: `ttft:500`."""
    name, _, limit = text.partition(":")
    if name not in GOODPUT:
        raise ArgumentTypeError(f"{text!r} is none of {', '.join(GOODPUT)} with :MILLISECONDS")
    return name, positive(limit)


def count(text: str) -> int:
    """Parse a whole number, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"got {text!r}, expected an integer of at least 1")
    return int(text)


def positive(text: str) -> float:
    """Parse a finite number above 0."""
    if not 0 < _number(text) < math.inf:
        raise ArgumentTypeError(f"got {text!r}, expected a finite number above 0")
    return float(text)


def share(text: str) -> float:
    """Parse a number from 0 to 1."""
    if not 0 <= _number(text) <= 1:
        raise ArgumentTypeError(f"got {text!r}, expected a number from 0 to 1")
    return float(text)


def _number(text: str) -> float:
    """NaN for other texts."""
    try:
        return float(text)
    except ValueError:
        return math.nan
