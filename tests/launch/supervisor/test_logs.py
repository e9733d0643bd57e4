"""Log lines with the name of their process."""

import asyncio
import json
import os
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime

from penstock.launch.supervisor.output import MAX_LINE, Log, as_json, prefixed

PLAIN = "x | {}\n".format


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
    lines = written(lambda log: _put(log, b"a\nb\r\n\nc"))
    assert lines == ["x | a\n", "x | b\n", "x | \n", "x | c\n"]


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
        _put(log, b"fatal: ")
        log.finish()
        _put(log, b"up\n")

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
            _put(log, b"y" * 50_000)
            log._read()

    lines = written(write)
    assert [len(line) for line in lines] == [4 + 100_000 + 1, 4 + 50_000 + 1]
    assert MAX_LINE < 100_000


def test_bytes_that_are_no_text_are_shown() -> None:
    lines = written(lambda log: _put(log, b"\xff\n"))
    assert lines == ["x | \N{REPLACEMENT CHARACTER}\n"]


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
    lines = written(lambda log: _put(log, data), lambda text: as_json(text, "worker.2"))
    assert lines[0] == '{"level": "info"}\n'
    maps = [json.loads(line) for line in lines[1:]]
    assert [one["message"] for one in maps] == others
    assert {one["process"] for one in maps} == {"worker.2"}
    moment = datetime.fromisoformat(maps[0]["time"])
    assert abs((datetime.now(UTC) - moment).total_seconds()) < 3600


def _put(log: Log, data: bytes) -> None:
    os.write(log.writer, data)
