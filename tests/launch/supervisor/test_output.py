"""Log lines with the name of their process, and output that nobody waits for."""

import asyncio
import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from penstock.launch.supervisor import output
from penstock.launch.supervisor.output import MAX_LINE, Log, Output, as_json, prefixed

PLAIN = "x | {}\n".format
MAX_BYTES = 1 << 18  # more than a pipe holds


def put(log: Log, data: bytes) -> None:
    os.write(log.writer, data)


def written(write: Callable[[Log], None], show: Callable[[str], str] = PLAIN) -> list[str]:
    """Return the lines printed of what `write` puts into the pipe."""
    lines: list[str] = []

    async def run() -> None:
        log = Log(lambda text: lines.append(show(text)))
        write(log)
        log.close()

    asyncio.run(run())
    return lines


def test_every_line_has_the_prefix() -> None:
    lines = written(lambda log: put(log, b"a\nb\r\n\n\xff\nc"))
    assert lines == ["x | a\n", "x | b\n", "x | \n", "x | \N{REPLACEMENT CHARACTER}\n", "x | c\n"]


def test_the_pipe_outlives_its_writers() -> None:
    """The output of a crashed process is read after its death; the next process continues."""

    def write(log: Log) -> None:
        for number in range(3):
            writer = os.dup(log.writer)
            os.write(writer, b"%d" % number + b"y" * 20_000 + b"\n")
            os.close(writer)

    lines = written(write)
    assert [line[:5] for line in lines] == ["x | 0", "x | 1", "x | 2"]
    assert {len(line) for line in lines} == {4 + 1 + 20_000 + 1}


def test_the_last_words_of_a_process_are_a_line_of_their_own() -> None:
    def write(log: Log) -> None:
        put(log, b"fatal: ")
        log.finish()
        put(log, b"up\n")

    assert written(write) == ["x | fatal: \n", "x | up\n"]


def test_what_still_writes_after_the_end_holds_nothing_up() -> None:
    """A child of a process that has ended may have its pipe."""

    def write(log: Log) -> None:
        with subprocess.Popen(["yes"], stdout=log.writer) as child:
            log.finish()
            child.kill()

    assert set(written(write)) <= {"x | y\n", "x | \n"}


def test_a_line_without_end_is_cut() -> None:
    def write(log: Log) -> None:
        for _ in range(3):
            put(log, b"y" * 50_000)
            log._read()

    lines = written(write)
    assert [len(line) for line in lines] == [4 + 100_000 + 1, 4 + 50_000 + 1]
    assert MAX_LINE < 100_000


def test_a_name_is_put_before_its_lines() -> None:
    assert prefixed("a", "worker.2", 3) == "worker.2      | a\n"
    assert prefixed("a", "worker.2", 3, "gpu1") == "worker.2@gpu1      | a\n"


def test_the_node_is_in_every_map() -> None:
    for text in ('{"level": "\N{SNOWMAN}"}', "\N{SNOWMAN}"):
        line = as_json(text, "worker.2", "gpu1")
        assert json.loads(line)["node"] == "gpu1"
        assert line.isascii()


def test_json_maps_are_left_as_they_are() -> None:
    """Whatever else a process prints, a traceback, becomes the message of a map."""
    others = ["Traceback:", "", "[1]", "3", "[" * 9000, '{"a": ', "\N{SNOWMAN}"]
    data = "\n".join(['{"level": "info"}', *others, ""]).encode()
    lines = written(lambda log: put(log, data), lambda text: as_json(text, "worker.2"))
    assert lines[0] == '{"level": "info"}\n'
    maps = [json.loads(line) for line in lines[1:]]
    assert [one["message"] for one in maps] == others
    assert {one["process"] for one in maps} == {"worker.2"}
    moment = datetime.fromisoformat(maps[0]["time"])
    assert abs((datetime.now(UTC) - moment).total_seconds()) < 3600


# ---- output that waits for its reader ----


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
