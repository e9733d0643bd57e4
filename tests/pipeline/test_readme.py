"""The README's first commands, as printed, with a pipeline of the default name."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pipeline.conftest import START_TIMEOUT, Pipeline
from tests.test_readme import CODE, README

pytestmark = pytest.mark.pipeline


@pytest.fixture
def default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipeline]:
    """Yield a pipeline of the default name, in a run folder of its own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with Pipeline(name="default") as pipeline:
        yield pipeline


def run(command: str, stdin: str = "") -> str:
    assert f"`{command}`" in README
    words = [sys.executable, "-P", "-m", "penstock.launch", *shlex.split(command)[1:]]
    done = subprocess.run(
        words, input=stdin, capture_output=True, text=True, timeout=START_TIMEOUT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_commands_do_what_they_say(default: Pipeline) -> None:
    assert run('launch ask "17+25="') == "42\n"
    assert "17" in run("launch chat", "repeat: 17\n")
    assert run("launch scale detokenizer 4") == "detokenizer: 4\n"
    assert len(re.findall(r"^detokenizer\.\d", run("launch status"), re.M)) == 4
    text = next(text for kind, text in CODE.findall(README) if kind == "python")
    assert "tcp://127.0.0.1:5555" in text
    program = text.replace("tcp://127.0.0.1:5555", default.endpoint)
    expected = re.search(r"print\(.*\)  # (.*)", text)
    assert expected
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{expected[1]}\n"
    run("launch stop")
    assert default.wait() == 0
