"""Calls that are to come."""

from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """What an event loop gives for a call that is to come."""

    def cancel(self) -> None:
        """Prevents the call."""


CallLater = Callable[[float, Callable[[], None]], Timer]
"""calls a function in so many seconds, and `Gateway.pump` after it"""
