"""The parts of a start."""

import psutil

from penstock.services.worker.timings import StartTimes


def test_parts_follow_one_another_from_the_start_of_the_process() -> None:
    start = psutil.Process().create_time()
    times = StartTimes()
    times.end("imports", start + 1.25)
    times.end("weights", start + 3.5)
    assert str(times) == "3.50 s (imports 1.25, weights 2.25)"
