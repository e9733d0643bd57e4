"""`launch completion`: the scripts, in the shells that they are for."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(60)
# programs that print the words for $1, by the script in their input
COMPLETE = {
    "bash": """\
source /dev/stdin
COMP_LINE=$1 COMP_POINT=${#1} COMP_TYPE=9
_python_argcomplete launch
printf '%s\\n' "${COMPREPLY[@]% }"
""",
    "zsh": """\
compdef() { :; }
_describe() { print -l -- ${completions%%:*}; }
source /dev/stdin
BUFFER=$1 CURSOR=${#1} words=(launch)
_python_argcomplete
""",
    "fish": "source -; complete -C $argv[1]",
}
# with the folder of `launch`
ENVIRONMENT = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.fixture(scope="module", params=list(COMPLETE))
def shell(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if shutil.which(name) is None:
        pytest.skip(f"needs {name}")
    return name


@pytest.fixture(scope="module")
def script(shell: str) -> bytes:
    command = [sys.executable, "-P", "-m", "penstock.launch", "completion", shell]
    return subprocess.run(command, check=True, capture_output=True).stdout


def complete(shell: str, script: bytes, line: str) -> set[str]:
    """Return the words that may stand in place of the last word."""
    flag, name = {"bash": ("--norc", ["-"]), "zsh": ("-f", ["-"]), "fish": ("-N", [])}[shell]
    command = [shell, flag, "-c", COMPLETE[shell], *name, line]
    done = subprocess.run(command, input=script, check=True, capture_output=True, env=ENVIRONMENT)
    assert done.stderr == b""
    return {line.partition("\t")[0] for line in done.stdout.decode().splitlines() if line}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("sta", {"status"}),
        ("ch", {"chat", "chaos"}),
        ("--name x sto", {"stop"}),
        ("bench s", {"serve"}),
        ("bench serve --num-pr", {"--num-prompts"}),
        ("all --tp 2 --device ", {"auto", "cpu", "cuda"}),
        ("completion z", {"zsh"}),
        ("collect-env --tp", set()),
        ("ask --timeo", {"--timeout"}),
        ("ask stop --temperatu", {"--temperature"}),  # a word of a question is no command
    ],
)
def test_words_are_completed(shell: str, script: bytes, line: str, expected: set[str]) -> None:
    assert complete(shell, script, f"launch {line}") == expected


def test_files_are_completed(shell: str, script: bytes, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    assert complete(shell, script, f"launch serve {tmp_path}/mo") == {f"{tmp_path}/model/"}
