"""Output that waits for its reader, while nobody waits for it."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.launch.supervisor import output
from penstock.launch.supervisor.output import Output

MAX_BYTES = 1 << 18  # more than a pipe holds


@contextmanager
def piped(on_closed: Callable[[], None]) -> Iterator[tuple[Output, int]]:
    """Yield an output into a pipe, and the end to read from."""
    reader, writer = os.pipe()
    one = Output(on_closed, "{} dropped\n".format)
    one._descriptors = [writer, None]
    yield one, reader
    one.close()
    os.close(writer)


def test_lines_that_find_no_room_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MAX_WAITING_BYTES", MAX_BYTES)
    number = 100_000
    with piped(lambda: pytest.fail("closed")) as (one, reader):
        for index in range(number):
            one.write(f"{index}\n")
        with os.fdopen(reader) as lines:
            shown = 0
            while (line := lines.readline()) == f"{shown}\n":
                shown += 1
            assert MAX_BYTES // 6 < shown < number
            assert line == f"{number - shown} dropped\n"
            one.write("there is room again\n")
            assert lines.readline() == "there is room again\n"


def test_a_reader_that_leaves_is_noticed() -> None:
    left = threading.Event()
    with piped(left.set) as (one, reader):
        os.close(reader)
        one.write("x\n")
        assert left.wait(60)


def test_a_full_disk_ends_nothing_and_lost_lines_are_counted(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log, Path("/dev/full").open("wb") as full:

        def dropped(number: int) -> str:
            one._descriptors = [log.fileno(), None]  # there is room again
            return f"{number} dropped\n"

        one = Output(lambda: pytest.fail("closed"), dropped)
        one._descriptors = [full.fileno(), None]
        one.write("1\n2\n")
        one.write("3\n")
        one.close()
    assert (tmp_path / "log").read_text() == "2 dropped\n3\n"


def test_the_last_lines_are_written_and_those_of_errors_in_their_order(tmp_path: Path) -> None:
    with (tmp_path / "both").open("wb") as both:
        one = Output(lambda: pytest.fail("closed"), str)
        one._descriptors = [both.fileno()] * 2
        for index in range(1000):
            one.write(f"{index}\n", is_error=index % 2 == 1)
        one.close()
    assert (tmp_path / "both").read_text().split() == [str(index) for index in range(1000)]
