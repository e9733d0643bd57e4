"""The files of `launch batch`: no file of something else is changed."""

import sys
from pathlib import Path

import msgspec
import pytest

from penstock.launch.commands import batch
from penstock.launch.commands.batch import Outcome
from penstock.launch.commands.cli import main
from penstock.launch.pipeline.errors import LaunchError

RESULT = b'{"id":"batch_req_1","custom_id":"a","response":{"status_code":200},"error":null}\n'


def done(path: Path) -> set[str | None]:
    """Return the lines that have a result."""
    with path.open("a+b") as output:
        return batch._read_done(output)


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
