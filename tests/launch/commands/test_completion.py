"""`launch completion`: the scripts, in the shells that they are for."""

import shutil
import subprocess
import sys
from collections.abc import Sequence

import pytest

pytestmark = pytest.mark.timeout(60)
COMPLETE = {
    "bash": """\
source /dev/stdin
COMP_WORDS=("$@")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_launch
printf '%s\\n' "${COMPREPLY[@]}"
""",
    "zsh": """\
compdef() { :; }
compadd() { shift; print -l -- ${(M)@:#${words[CURRENT]}*}; }
_files() { :; }
source /dev/stdin
words=("$@") CURRENT=$#
_launch
""",
    "fish": "source -; complete -C (string join ' ' -- $argv)",
}


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


def complete(shell: str, script: bytes, words: Sequence[str]) -> set[str]:
    """Return the words that may stand in place of the last one."""
    flag, name = {"bash": ("--norc", ["-"]), "zsh": ("-f", ["-"]), "fish": ("-N", [])}[shell]
    command = [shell, flag, "-c", COMPLETE[shell], *name, *words]
    done = subprocess.run(command, input=script, check=True, capture_output=True)
    assert done.stderr == b""
    return {line.partition("\t")[0] for line in done.stdout.decode().splitlines() if line}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sta"], {"status"}),
        (["ch"], {"chat", "chaos"}),
        (["--name", "x", "sto"], {"stop"}),
        (["bench", "s"], {"serve"}),
        (["bench", "serve", "--num-pr"], {"--num-prompts"}),
        (["all", "--tp", "2", "--device", ""], {"auto", "cpu", "cuda"}),
        (["completion", "z"], {"zsh"}),
        (["collect-env", "--tp"], set()),
        (["ask", "--timeo"], {"--timeout"}),
    ],
)
def test_words_are_completed(
    shell: str, script: bytes, words: list[str], expected: set[str]
) -> None:
    assert complete(shell, script, ["launch", *words]) == expected


def test_a_word_of_a_question_is_no_command(shell: str, script: bytes) -> None:
    assert "--temperature" in complete(shell, script, ["launch", "ask", "stop", "--temp"])
