"""The agents of docs/guides/clients.md: each runs a tool that the pipeline has called."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.pipeline.clients.forcing_proxy import LAST, Call, forcing, results
from tests.pipeline.clients.test_clients import ENVIRONMENT
from tests.pipeline.conftest import Pipeline
from tests.pipeline.http_api import KEY, MODEL
from tests.pipeline.ports import free_port

pytestmark = [pytest.mark.pipeline, pytest.mark.clients]
MODULES = ENVIRONMENT / "node_modules"
COMMAND = "echo made by the tool | tee made.txt"
TASK = "Write the file."


@pytest.fixture(scope="module")
def url(pipeline: Callable[..., Pipeline]) -> str:
    """Start a pipeline that takes requests as long as agents send them."""
    port = str(free_port())
    flags = ("--http", "1", "--http-port", port, "--api-key", KEY)
    pipeline(*flags, "--served-model-name", MODEL)
    return f"http://127.0.0.1:{port}"


def version(package: str) -> str:
    description = json.loads((MODULES / package / "package.json").read_text())
    return str(description["version"])


def run(folder: Path, *command: str | Path, **env: str) -> str:
    """Run an agent in a folder, which is its home, too; return its output."""
    path = f"{ENVIRONMENT / 'bin'}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        command,
        cwd=folder,
        env={"PATH": path, "HOME": str(folder)} | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def codex(folder: Path, url: str) -> str:
    settings = {
        "model": MODEL,
        "model_provider": "penstock",
        "check_for_update_on_startup": False,
        "analytics.enabled": False,
        "model_providers.penstock.name": "Penstock",
        "model_providers.penstock.base_url": url,
        "model_providers.penstock.wire_api": "responses",
        "model_providers.penstock.request_max_retries": 0,
        "model_providers.penstock.stream_max_retries": 0,
    }
    flags = [
        part for name, value in settings.items() for part in ("-c", f"{name}={json.dumps(value)}")
    ]
    tool = MODULES / ".bin" / "codex"
    where = ("--skip-git-repo-check", "--sandbox", "danger-full-access")
    return run(folder, tool, "exec", *flags, *where, TASK)


def opencode(folder: Path, url: str) -> str:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": url, "apiKey": KEY},
        "models": {MODEL: {}},
    }
    config = {"provider": {"penstock": provider}, "model": f"penstock/{MODEL}", "autoupdate": False}
    tool = MODULES / "opencode-linux-x64" / "bin" / "opencode"
    env = {"OPENCODE_CONFIG_CONTENT": json.dumps(config), "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    return run(folder, tool, "run", TASK, **env)


def qwen_code(folder: Path, url: str) -> str:
    settings = {
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"enableAutoUpdate": False},
    }
    (folder / ".qwen").mkdir()
    (folder / ".qwen" / "settings.json").write_text(json.dumps(settings))
    env = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": KEY, "OPENAI_MODEL": MODEL}
    tool = MODULES / ".bin" / "qwen"
    return run(folder, tool, "--auth-type", "openai", "--yolo", "-p", TASK, **env)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("package", "agent", "call"),
    [
        ("@openai/codex", codex, Call("exec_command", {"cmd": COMMAND})),
        (
            "opencode-linux-x64",
            opencode,
            Call("bash", {"command": COMMAND, "description": "Writes."}),
        ),
        (
            "@qwen-code/qwen-code",
            qwen_code,
            Call("run_shell_command", {"command": COMMAND, "is_background": False}),
        ),
    ],
)
def test_a_tool_loop(
    package: str, agent: Callable[[Path, str], str], call: Call, url: str, tmp_path: Path
) -> None:
    with forcing(url, KEY, [call]) as conversation:
        said = agent(tmp_path, conversation.url)
    assert conversation.errors == []
    assert LAST in said
    assert (tmp_path / "made.txt").read_text() == "made by the tool\n"
    (result,) = results(conversation.bodies[-1])
    assert "made by the tool" in result
    page = (ROOT / "docs/guides/clients.md").read_text()
    assert f"| {version(package)} |" in page


def test_codex_finds_the_functions_of_namespaces(url: str, tmp_path: Path) -> None:
    """Codex answers a call of its namespace; a call without it would be `unsupported`."""
    calls = [Call("close_agent", {"target": "nobody"}, "multi_agent_v1")]
    with forcing(url, KEY, calls) as conversation:
        codex(tmp_path, conversation.url)
    (result,) = results(conversation.bodies[-1])
    assert "invalid agent id" in result
    assert {headers["x-ignored-tools"] for headers in conversation.headers} == {"web_search"}
    (call,) = (item for item in conversation.bodies[-1]["input"] if item["type"] == "function_call")
    assert (call["namespace"], call["name"]) == ("multi_agent_v1", "close_agent")
