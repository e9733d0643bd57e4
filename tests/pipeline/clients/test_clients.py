"""The table of clients in docs/guides/clients.md: each cell against running pipelines.

`make test-long` has the clients of the extra `dev`, `make test-clients` the others.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.models.checkpoints import save_embedding_model
from tests.pipeline.conftest import Pipeline
from tests.pipeline.http_api import KEY, MODEL
from tests.pipeline.ports import free_port

pytestmark = pytest.mark.pipeline
HERE = ("openai", "anthropic", "langchain-openai")
"""clients of the extra `dev`"""
ENVIRONMENT = ROOT / "build" / "clients"
CELLS = ("text", "stream", "tools", "schema", "embeddings")


def rows(language: str) -> dict[str, dict[str, str]]:
    """Return the rows of a language's table in the page, without empty cells."""
    page = (ROOT / "docs/guides/clients.md").read_text()
    section = page.partition(f"\n## {language}\n")[2].partition("\n## ")[0]
    table = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:1] == "|"]
    header, _, *lines = table
    assert header == ["client", "version", "API", *CELLS]
    found = {}
    for line in lines:
        row = dict(zip(header, line, strict=True))
        name = re.sub(r"[`\[]|\].*", "", row.pop("client"))
        row.pop("API")
        found[name] = {cell: value for cell, value in row.items() if value != "–"}
    return found


PYTHON, NODE = rows("Python"), rows("npm")


@pytest.fixture(scope="module")
def embedding_url(
    pipeline: Callable[..., Pipeline], tmp_path_factory: pytest.TempPathFactory
) -> str:
    """Start a pipeline of a small embedding model; return where its HTTP is."""
    folder = tmp_path_factory.mktemp("embedding")
    save_embedding_model(folder)
    port = str(free_port())
    flags = ("--http", "1", "--http-port", port, "--api-key", KEY)
    pipeline("--model", str(folder), "--served-model-name", MODEL, *flags)
    return f"http://127.0.0.1:{port}"


def run(*command: str | Path) -> dict[str, str]:
    """Return the row that a script prints last."""
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,  # bytecode of large clients is compiled at their first start
        env=os.environ | {"CLIENTS_NODE": str(ENVIRONMENT), "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    )
    assert ended.returncode == 0, ended.stderr
    row: dict[str, str] = json.loads(ended.stdout.splitlines()[-1])
    return row


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one, marks=pytest.mark.long if one in HERE else pytest.mark.clients)
        for one in PYTHON
    ],
)
def test_python(name: str, url: str, embedding_url: str) -> None:
    python = sys.executable if name in HERE else ENVIRONMENT / "bin" / "python"
    script = Path(__file__).with_name("python_clients.py")
    assert run(python, script, name, url, KEY, MODEL, embedding_url) == PYTHON[name]


@pytest.mark.clients
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NODE)
def test_npm(name: str, url: str, embedding_url: str) -> None:
    script = Path(__file__).with_name("node_clients.mjs")
    node = ENVIRONMENT / "bin" / "node"
    assert run(node, script, name, url, KEY, MODEL, embedding_url) == NODE[name]
