"""The files of `launch batch`: no file of something else is changed."""

import contextlib
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from penstock.launch.extras import batch
from penstock.launch.extras.batch import Outcome
from penstock.launch.pipeline.errors import LaunchError
from penstock.protocol.config import Config
from tests.launch.conftest import Launch

RESULT = b'{"id":"batch_req_1","custom_id":"a","response":{"status_code":200},"error":null}\n'


def done(path: Path) -> set[str | None]:
    """Return the lines that have a result."""
    with path.open("a+b") as output:
        return batch._read_results(output).done


class Runner:
    """`launch batch` with an HTTP server that answers with the `status` of a request's body."""

    def __init__(self, folder: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
        self.source, self.target, self._launch = folder / "in", folder / "out", launch
        self.sent: list[str] = []
        monkeypatch.setattr(batch, "_target", lambda _: contextlib.nullcontext(Config()))
        monkeypatch.setattr(batch, "_post", self._post)

    async def _post(self, _: httpx.AsyncClient, line: batch.Line) -> httpx.Response:
        self.sent.append(line.custom_id)
        return httpx.Response(line.body["status"], json={})

    def run(self, *lines: tuple[str, int], code: int) -> str:
        """Return what is reported of lines of a custom_id and a status."""
        fields = {"url": "/v1/completions"}
        maps = [fields | {"custom_id": name, "body": {"status": n}} for name, n in lines]
        self.source.write_text("".join(f"{json.dumps(one)}\n" for one in maps))
        command = ("batch", str(self.source), str(self.target), "--concurrency", "2")
        return self._launch(*command, code=code).err

    @property
    def results(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.target.read_text().splitlines()]


@pytest.fixture
def runner(tmp_path: Path, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> Runner:
    return Runner(tmp_path, launch, monkeypatch)


def test_a_repeated_custom_id_is_a_bad_line(runner: Runner) -> None:
    """In a first run, and where an earlier one has the result of the first of these lines."""
    runner.run(("a", 200), code=0)
    said = runner.run(("a", 200), ("b", 200), ("a", 200), ("b", 200), code=1)
    assert said.endswith(": 2 bad, 1 done, 1 skipped\n")
    assert runner.sent == ["a", "b"]
    first, second = (one for one in runner.results if one["error"])
    assert (first["id"], first["custom_id"]) == ("batch_req_3", "a")
    assert (second["id"], second["custom_id"]) == ("batch_req_4", "b")
    assert first["error"]["message"].startswith("custom_id: got 'a' on lines 1 and 3, expected")


def test_errors_of_an_earlier_run_are_counted_and_fail(runner: Runner) -> None:
    """Until their lines are removed from the output; then they are sent again."""
    lines = [("a", 200), ("b", 400), ("c", 200), ("a", 200)]
    said = runner.run(*lines, code=1)
    assert "| 4/4 [" in said
    assert said.endswith(": 1 bad, 2 done, 1 refused\n")
    before = runner.target.read_text()
    said = runner.run(*lines, ("d", 200), code=1)
    assert "| 5/5 [" in said  # lines with a result of an earlier run count as done
    earlier = ": 1 bad in an earlier run, 1 done, 1 refused in an earlier run, 2 skipped\n"
    assert said.endswith(earlier)
    assert runner.sent == ["a", "b", "c", "d"]
    assert runner.target.read_text().startswith(before)
    good = [one for one in before.splitlines() if '"status_code":200' in one]
    runner.target.write_text("".join(f"{one}\n" for one in good))
    said = runner.run(("a", 200), ("b", 200), ("c", 200), code=0)
    assert said.endswith(": 1 done, 2 skipped\n")


@pytest.mark.parametrize("size", [1, 10, len(RESULT) - 1])
def test_an_incomplete_last_line_is_cut_off(tmp_path: Path, size: int) -> None:
    path = tmp_path / "out"
    path.write_bytes(RESULT + RESULT[:size])
    assert done(path) == {"a"}
    assert path.read_bytes() == RESULT


def test_a_line_begins_as_an_incomplete_one() -> None:
    line = msgspec.json.encode(Outcome("batch_req_1", None, None, None))
    assert line.startswith(batch.START)


@pytest.mark.parametrize("text", [b'{"custom_id": "a"}', b"\x7fELF", b'{"id":"batch-', b"[]\n"])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, text: bytes) -> None:
    """The file's last line may lack a newline."""
    path = tmp_path / "out"
    path.write_bytes(text)
    with pytest.raises(LaunchError, match="out:1 is not a result of a batch"):
        done(path)
    assert path.read_bytes() == text
