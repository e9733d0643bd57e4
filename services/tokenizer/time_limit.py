"""A limit for Python code of somebody else."""

import contextlib
import signal
from collections.abc import Iterator
from typing import NoReturn


class TimeLimitError(BaseException):
    """The time is over. No Exception: the code that is cut off may catch those."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimitError in the block after this much CPU time. For the main thread.

    A call into C is not interrupted; the supervisor ends one that lasts for --step-timeout.
    """

    def end(*_: object) -> NoReturn:
        raise TimeLimitError(seconds)

    before = signal.signal(signal.SIGVTALRM, end)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
