"""Every command of the README is one that the command line takes; the small ones run as printed."""

import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from penstock.launch.commands import cli
from penstock.launch.errors import LaunchError

README = (Path(__file__).parents[1] / "README.md").read_text()
CODE = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
VARIABLE = re.compile(r'"?\$(\{\w+[^}]*\}|\w+)[^"\s]*"?')
IN_SHELL = re.compile(r"(?:^|&& |-- +|exec |trap ')launch( [^&#'\n]*)?", re.M)
SMALL = [
    "launch",
    "launch --version",
    "launch options",
    "launch keys keys",
    "launch keys keys --client alice",
    "launch bench capacity",
    "launch bench capacity --stream-share 0",
]


def in_blocks() -> list[str]:
    """Commands of the blocks of code, with a number for each variable."""
    found = []
    for kind, text in CODE.findall(README):
        if kind in ("sh", "bash", "yaml"):
            joined = re.sub(r"\\\n *|\n +(?=--)", " ", text)
            found += [VARIABLE.sub("4", match[0]) for match in IN_SHELL.finditer(joined)]
    return [re.sub(r"^.*?(?=launch)", "", one).strip() for one in found]


def in_text(pattern: str = r"launch(?: |$)") -> list[str]:
    """Commands within sentences and tables."""
    spans = re.findall(r"`([^`]+)`", CODE.sub("", README))
    spans = [" ".join(one.split()).removesuffix(" …") for one in spans]
    return [one for one in spans if re.match(pattern, one)]


def parse(command: str) -> None:
    cli._parser().parse_args(shlex.split(command)[1:])


def test_the_commands_are_found() -> None:
    blocks, text = in_blocks(), in_text()
    assert len(blocks) > 10
    assert len(text) > 50
    assert "launch keys keys" in blocks
    assert "launch bench make-model 0.6B 0.6B" in blocks
    assert any(one.startswith("launch all --on ray --address=4 --tp 8 --dp 4") for one in blocks)
    assert any("--http-host 4" in one for one in blocks)
    assert set(SMALL) <= {*blocks, *text}


@pytest.mark.parametrize(
    "command", sorted({*in_blocks(), *in_text()} - {"launch", "launch --version"})
)
def test_a_command_parses(command: str) -> None:
    """One that is only mentioned, as `launch scale`, lacks its arguments."""
    try:
        parse(command)
    except LaunchError as error:
        is_mention = command in in_text() and not re.search(r"[^a-z ]", command)
        assert is_mention, error
        assert "arguments are required" in str(error)


@pytest.mark.parametrize("broken", ["launch all --tpp 2", "launch stat", "launch bench serv"])
def test_a_wrong_command_would_be_noticed(broken: str) -> None:
    with pytest.raises(LaunchError, match="unknown"):
        parse(broken)


@pytest.mark.parametrize("command", sorted(set(in_text(r"python -m "))))
def test_a_module_exists(command: str) -> None:
    assert find_spec(command.split()[2])


@pytest.mark.parametrize("command", SMALL)
def test_a_small_command_runs(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["launch", "keys", "keys"])
    if command.endswith("--client alice"):
        with pytest.raises(SystemExit):
            cli.main()
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0
    assert capsys.readouterr().out


def test_python_parses() -> None:
    blocks = [text for kind, text in CODE.findall(README) if kind == "python"]
    assert len(blocks) >= 2
    for text in blocks:
        compile(text, "README.md", "exec")
