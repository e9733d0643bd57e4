"""Every command of the documentation and of the examples is one that the command line takes."""

import functools
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from penstock.launch.commands import cli
from penstock.launch.commands.cli import Parser
from penstock.launch.pipeline.errors import LaunchError
from tests.docs.pages import ROOT, blocks, prose

VARIABLE = re.compile(r'"?\$(\{\w+[^}]*\}|\w+)[^"\s]*"?')
IN_SHELL = re.compile(r"(?:^|&& |-- +|exec |trap '|\.venv/bin/)launch( [^&#'\n|]*)?", re.M)
EXAMPLES = [ROOT / "examples" / "kuberay.yaml", ROOT / "examples" / "slurm.sh"]
FOLDERS = "docs|examples|kernels|launch|models|protocol|services|tests"
FOREIGN = {
    *("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "OpenAILike", "OpenAILikeEmbedding"),
    *("Poller.poll", "Dockerfile.cuda"),
}
"""names of transformers, llama-index and pyzmq, and a file"""
SOURCE = "\n".join(
    path.read_text()
    for top in ("kernels", "launch", "models", "protocol", "services")
    for path in ROOT.glob(f"{top}/**/*.py")
)


def in_blocks() -> list[str]:
    """Commands of the blocks of code, with a number for each variable."""
    found = []
    for text in [one.code for one in blocks("sh")] + [path.read_text() for path in EXAMPLES]:
        joined = re.sub(r"\\\n *|\n +(?=--)", " ", text)
        found += [VARIABLE.sub("4", match[0]) for match in IN_SHELL.finditer(joined)]
    return [re.sub(r"^.*?(?=launch)", "", one).strip() for one in found]


def in_text(pattern: str = r"launch(?: |$)") -> list[str]:
    """Commands within sentences and tables."""
    spans = [one for page, text in prose() if "reference/" not in page for one in _spans(text)]
    return [one for one in spans if re.match(pattern, one)]


def _spans(text: str) -> list[str]:
    found = re.findall(r"`([^`]+)`", text)
    return [" ".join(one.split()).removesuffix(" …") for one in found]


@functools.cache
def parser() -> Parser:
    found = cli.make_parser()
    assert isinstance(found, Parser)
    return found


def parse(command: str) -> None:
    parser().parse_args(shlex.split(command)[1:])


def test_the_commands_are_found() -> None:
    commands, text = in_blocks(), in_text()
    assert len(commands) > 10
    assert len(text) > 50
    assert "launch keys keys" in commands
    assert "launch bench make-model 0.6B 0.6B" in commands
    assert any(
        one.startswith("launch all --backend ray --address=4 --tp 8 --dp 4") for one in commands
    )
    assert any("--http-host 4" in one for one in commands)


@pytest.mark.parametrize(
    "command", sorted({*in_blocks(), *in_text()} - {"launch", "launch --version"})
)
def test_a_command_parses(command: str) -> None:
    """One that is only mentioned, as `launch scale`, lacks its arguments."""
    try:
        parse(command)
    except LaunchError as error:
        is_mention = command in in_text() and not re.search(r"(^| )-|[^a-zA-Z -]", command)
        assert is_mention, error
        assert re.search("got nothing, expected a value|unknown command 'COMMAND'", str(error))


@pytest.mark.parametrize("broken", ["launch all --tpp 2", "launch stat", "launch bench serv"])
def test_a_wrong_command_would_be_noticed(broken: str) -> None:
    with pytest.raises(LaunchError, match="unknown"):
        parse(broken)


@pytest.mark.parametrize("command", sorted(set(in_text(r"python -m "))))
def test_a_module_exists(command: str) -> None:
    assert find_spec(command.split()[2])


@pytest.mark.parametrize("path", sorted(set(in_text(rf"(?:{FOLDERS})/[\w./-]*$"))))
def test_a_path_exists(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("name", sorted(set(in_text(r"[A-Z][a-z]+[A-Z]\w*$")) - FOREIGN))
def test_a_class_exists(name: str) -> None:
    assert re.search(rf"^(class {name}\b|{name} = )", SOURCE, re.M)


@pytest.mark.parametrize("name", sorted(set(in_text(r"[A-Z][a-z]\w+\.[a-z]\w*$")) - FOREIGN))
def test_a_member_exists(name: str) -> None:
    owner, _, member = name.partition(".")
    body = re.search(rf"^class {owner}\b.*?(?=^\S|\Z)", SOURCE, re.M | re.S)
    assert body
    assert re.search(rf"^    (def {member}\(|{member}:)", body[0], re.M)


def test_mentioned_tests_exist() -> None:
    paths = {word for one in in_text(r".*pytest ") for word in one.split() if "tests/" in word}
    assert len(paths) > 5
    assert not [one for one in paths if not Path(ROOT, one).exists()]
