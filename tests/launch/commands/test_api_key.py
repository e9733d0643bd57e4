"""The API key is not in the list of processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.launch.commands.api_key import read_api_key, without_key
from penstock.launch.pipeline.errors import LaunchError
from penstock.protocol.config import Config

SECRET = "a secret"  # noqa: S105


@pytest.mark.parametrize(
    ("words", "kept", "key"),
    [
        (["launch", "all", "--tp", "2"], ["launch", "all", "--tp", "2"], None),
        (
            ["launch", "all", "--api-key", SECRET, "--tp", "2"],
            ["launch", "all", "--tp", "2"],
            SECRET,
        ),
        (["launch", f"--api-key={SECRET}=", "all"], ["launch", "all"], f"{SECRET}="),
        (["launch", "--api-key", "a", "--api-key=b"], ["launch"], "b"),
        (["launch", "--api-key-file", "a"], ["launch", "--api-key-file", "a"], None),
    ],
)
def test_a_command_line_without_its_key(words: list[str], kept: list[str], key: str | None) -> None:
    assert without_key(words) == (kept, key)


@pytest.mark.parametrize("flag", [["--api-key", SECRET], [f"--api-key={SECRET}"]])
def test_a_program_hides_its_key(flag: list[str]) -> None:
    """The command replaces itself, as the same process, with the key in its environment."""
    show = (
        "import json, os, sys, pathlib\n"
        "from penstock.launch.commands.api_key import hide_api_key\n"
        "hide_api_key()\n"
        "line = pathlib.Path('/proc/self/cmdline').read_text()\n"
        "print(json.dumps([os.getpid(), line, os.environ['PENSTOCK_API_KEY'], sys.argv[1:]]))\n"
    )
    command = [sys.executable, "-P", "-c", show, "all", *flag, "--tp", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        pid, line, key, words = json.loads(process.communicate()[0])
    assert (pid, key, words) == (process.pid, SECRET, ["all", "--tp", "2"])
    assert SECRET not in line


def test_a_file_of_the_key(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(LaunchError, match=f"--api-key-file: {path} can't be read: No such file"):
        read_api_key(Config(api_key_file=str(path)))
    path.write_text(f"{SECRET}\n")
    assert read_api_key(Config(api_key_file=str(path))).api_key == SECRET
    path.write_text("")
    with pytest.raises(LaunchError, match="is empty"):
        read_api_key(Config(api_key_file=str(path)))
    assert os.environ.get("PENSTOCK_API_KEY") is None
