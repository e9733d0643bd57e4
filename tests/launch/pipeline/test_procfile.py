"""The procfile and its lines."""

import subprocess
from pathlib import Path

import pytest

from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.procfile import PROCFILE, read_procfile, shell_line

ROOT = Path(__file__).parents[3]


def test_the_package_has_the_procfile_of_the_repository() -> None:
    assert PROCFILE.resolve() == ROOT / "procfile"
    kinds = ["gateway", "tokenizer", "scheduler", "worker", "detokenizer", "http"]
    assert list(read_procfile()) == kinds


def test_comments_and_empty_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "procfile"
    path.write_text("# two\n\na: x --y=1:2\n  b:z  \n")
    assert read_procfile(path) == {"a": "x --y=1:2", "b": "z"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: b\nnonsense\n", "procfile:2 is not `name: command`: 'nonsense'"),
        ("a:\n", "procfile:1 is not `name: command`: 'a:'"),
        ("a: b\na: c\n", "procfile:2 names a a second time"),
        ("# a: b\n", "procfile has no line, expected some of `name: command`"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "procfile"
    path.write_text(text)
    with pytest.raises(LaunchError) as refused:
        read_procfile(path)
    assert str(refused.value).endswith(sentence)


def test_a_missing_procfile_is_named(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="none can't be read"):
        read_procfile(tmp_path / "none")


def test_a_command_may_begin_with_assignments_and_replaces_the_shell() -> None:
    line = shell_line("A=1 sh -c 'echo $A $$'")
    with subprocess.Popen(["sh", "-c", line], stdout=subprocess.PIPE, text=True) as process:
        assert process.communicate()[0] == f"1 {process.pid}\n"
