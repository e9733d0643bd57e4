"""The files of `launch batch`: no file of something else is changed."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from penstock.launch.commands.cli import main
from penstock.launch.extras import batch
from penstock.launch.extras.batch import Outcome
from penstock.launch.pipeline.errors import LaunchError
from penstock.protocol.config import Config

RESULT = b'{"id":"batch_req_1","custom_id":"a","response":{"status_code":200},"error":null}\n'


def done(path: Path) -> set[str | None]:
    """Return the lines that have a result."""
    with path.open("a+b") as output:
        return batch._read_results(output).done


class Runner:
    """`launch batch` with an HTTP server that answers with the `status` of a request's body."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.source, self.target = folder / "in", folder / "out"
        self.sent: list[str] = []
        command = ["launch", "batch", str(self.source), str(self.target), "--concurrency", "2"]
        monkeypatch.setattr(sys, "argv", command)
        monkeypatch.setattr(batch, "_target", lambda _: contextlib.nullcontext(Config()))
        monkeypatch.setattr(batch, "_post", self._post)

    async def _post(self, _: httpx.AsyncClient, line: batch.Line) -> httpx.Response:
        self.sent.append(line.custom_id)
        return httpx.Response(line.body["status"], json={})

    def run(self, *lines: tuple[str, int]) -> int:
        """Return the exit code for lines of a custom_id and a status."""
        url = "/v1/completions"
        self.source.write_text(
            "".join(
                f"{json.dumps({'custom_id': name, 'url': url, 'body': {'status': status}})}\n"
                for name, status in lines
            )
        )
        with pytest.raises(SystemExit) as end:
            main()
        return int(end.value.code or 0)

    @property
    def results(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.target.read_text().splitlines()]


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    return Runner(tmp_path, monkeypatch)


def test_a_repeated_custom_id_is_a_bad_line(
    runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a first run, and where an earlier one has the result of the first of these lines."""
    assert runner.run(("a", 200)) == 0
    assert runner.run(("a", 200), ("b", 200), ("a", 200), ("b", 200)) == 1
    assert runner.sent == ["a", "b"]
    assert capsys.readouterr().err.endswith(": 2 bad, 1 done, 1 skipped\n")
    bad = [one for one in runner.results if one["error"]]
    assert [(one["id"], one["custom_id"]) for one in bad] == [
        ("batch_req_3", "a"),
        ("batch_req_4", "b"),
    ]
    assert bad[0]["error"]["message"] == (
        "custom_id: got 'a' on lines 1 and 3, expected a different one on each line"
    )


def test_errors_of_an_earlier_run_are_counted_and_fail(
    runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until their lines are removed from the output; then they are sent again."""
    lines = [("a", 200), ("b", 400), ("c", 200), ("a", 200)]
    assert runner.run(*lines) == 1
    assert capsys.readouterr().err.endswith(": 1 bad, 2 done, 1 refused\n")
    before = runner.target.read_text()
    assert runner.run(*lines) == 1
    summary = ": 1 bad in an earlier run, 1 refused in an earlier run, 2 skipped\n"
    assert capsys.readouterr().err.endswith(summary)
    assert (runner.sent, runner.target.read_text()) == (["a", "b", "c"], before)
    good = [one for one in before.splitlines() if '"status_code":200' in one]
    runner.target.write_text("".join(f"{one}\n" for one in good))
    assert runner.run(("a", 200), ("b", 200), ("c", 200)) == 0
    assert capsys.readouterr().err.endswith(": 1 done, 2 skipped\n")


def test_the_progress_has_the_number_of_lines(
    runner: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines with a result of an earlier run count as done."""
    runner.run(("a", 200), ("b", 400), ("a", 200))
    assert "| 3/3 [" in capsys.readouterr().err
    runner.run(("a", 200), ("b", 400), ("a", 200), ("c", 200))
    assert "| 4/4 [" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["/dev/null", "/dev/full"], "OUT.jsonl: got /dev/full, expected a file, which is read"),
        (["in", "out", "--concurrency", "0"], "--concurrency: got 0, expected 1 or more"),
    ],
)
def test_what_is_refused_before_a_pipeline_is_asked(
    words: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["launch", "batch", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith(f"launch: {sentence}")
