"""What a start of the worker takes, part by part."""

import time

import psutil


class StartTimes:
    """Seconds of each part of a start, from the moment the kernel made the process."""

    def __init__(self) -> None:
        self._parts: dict[str, float] = {}
        self._last = psutil.Process().create_time()

    def end(self, part: str, at: float | None = None) -> None:
        """A part ends, and the next one begins; `at`: when, if not now (seconds since 1970)."""
        now = time.time() if at is None else at
        self._parts[part] = now - self._last
        self._last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in self._parts.items())
        return f"{sum(self._parts.values()):.2f} s ({parts})"
