"""The code of the documentation and of the examples, run against one pipeline."""

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.docs.pages import ROOT, Block, blocks
from tests.docs.reference import PROCESS_COUNTERS
from tests.pipeline.conftest import START_TIMEOUT, Pipeline
from tests.pipeline.ports import free_port

pytestmark = [pytest.mark.pipeline, pytest.mark.timeout(60)]
RUN = [one for one in blocks("sh", "python") if not one.needs]
PROMISE = re.compile(r"print\(.*\)  # (.*)|# prints (.*)")


class Server(NamedTuple):
    """A running pipeline, and where its HTTP is."""

    pipeline: Pipeline
    url: str

    def here(self, text: str) -> str:
        """Return `text` with this pipeline's addresses in place of the documented ones."""
        text = text.replace("tcp://127.0.0.1:5555", self.pipeline.endpoint)
        return text.replace("http://127.0.0.1:8000", self.url)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a pipeline of the default name, in a run folder of its own."""
    port = str(free_port())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
        with Pipeline("--http", "1", "--http-port", port, name="default") as pipeline:
            yield Server(pipeline, f"http://127.0.0.1:{port}")


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Return a function that runs a Python file in this process and returns its output."""
    monkeypatch.chdir(tmp_path)

    def run(path: Path, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out

    return run


def shell(code: str, folder: Path) -> str:
    """Return the output of a shell that runs `code` with this environment's commands."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", code.replace(".venv/bin/", "")],
        cwd=folder,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def kept(promises: list[str], output: str) -> None:
    """Check that the output has all promised texts, in their order."""
    place = 0
    for promise in promises:
        place = output.find(promise, place) + len(promise)
        assert place >= len(promise), f"no {promise!r} there in {output!r}"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("openai_client.py", "42\n3 4 5 6 7 8 9\n"),
        (
            "structured.py",
            "{'city': 'Paris', 'population': 2102650}\n3 4 5 6 7 8 9\n42\n",
        ),
        ("tools.py", "add(17, 25)\n17 + 25 = 42\n"),
        (
            "zmq_client.py",
            "3 4 5 6 7 8 9\n{'prompt_tokens': 17, 'cached_tokens': 0, 'output_tokens': 15}\n",
        ),
    ],
)
def test_an_example_runs(
    name: str,
    expected: str,
    server: Server,
    run: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
    path = ROOT / "examples" / name
    arguments = [server.pipeline.endpoint] if "[ENDPOINT]" in path.read_text() else []
    assert run(path, *arguments) == expected


def test_the_offline_example_runs(run: Callable[..., str]) -> None:
    output = run(ROOT / "examples" / "offline.py")
    assert output.splitlines() == ["17+25= 42", "count from 3 to 9 3 4 5 6 7 8 9", "kcotsnep"]


def test_all_metrics_are_documented(server: Server) -> None:
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    names = set(re.findall(r"^# TYPE (\S+)", text, re.M))
    assert len(names) > 30
    assert not [one for one in names if f"`{one}`" not in page]
    counted = set(re.findall(r"^penstock:process_(\w+)\{process=\"gateway", text, re.M))
    assert {*PROCESS_COUNTERS["all"], *PROCESS_COUNTERS["gateway"]} <= counted


@pytest.mark.parametrize("block", sorted(RUN, key=lambda one: "launch stop" in one.code), ids=str)
def test_a_block_does_what_it_says(
    block: Block, server: Server, run: Callable[..., str], tmp_path: Path
) -> None:
    """Last in this module: the last block is `launch stop`."""
    code = server.here(block.code)
    promises = [said or printed for said, printed in PROMISE.findall(block.code)]
    if block.language == "python":
        (tmp_path / "block.py").write_text(code)
        output = run(tmp_path / "block.py")
    else:
        output = shell(code, tmp_path)
    kept(promises, output)
    if "launch stop" in code:
        assert server.pipeline.wait() == 0
