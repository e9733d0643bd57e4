"""A pipeline of a model that is known by its name on a hub."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from penstock.launch.pipeline.target import free_port
from penstock.protocol.config import Config
from tests.launch.pipeline.fake_hub import FakeHub
from tests.pipeline.conftest import Pipeline

pytestmark = pytest.mark.pipeline
NAME = "Qwen/Qwen3-demo"
WEIGHTS = "model.safetensors"


def test_a_name_on_the_hub_is_served_by_this_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    port = free_port()
    with FakeHub({NAME: Config().model_folder}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        pipeline = Pipeline("--model", NAME, "--http", "1", "--http-port", str(port))
        pipeline.wait_for("ready: ")
    with pipeline:
        assert pipeline.wait_for("ready: ").startswith(f"ready: {NAME} on ")
        assert pipeline.run("ask", "17+25=").stdout == "42\n"
        url = f"http://127.0.0.1:{port}/v1"
        models = httpx.get(f"{url}/models", trust_env=False, timeout=60).json()
        assert [one["id"] for one in models["data"]] == [NAME]
        body = {"model": NAME, "prompt": "17+25=", "max_tokens": 8}
        answer = httpx.post(f"{url}/completions", json=body, trust_env=False, timeout=60).json()
        assert answer["choices"][0]["text"] == "42"


@pytest.fixture
def ray_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Start a Ray node of this machine with a cache of its own; return its address."""
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    ray, address = str(Path(sys.executable).with_name("ray")), f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_enable_metrics_collection", "0")
    with (
        FakeHub({NAME: Config().model_folder}) as hub,
        tempfile.TemporaryDirectory(prefix="ray-") as sessions,  # paths of sockets are short
    ):
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        node = subprocess.Popen(
            [
                *(ray, "start", "--head", "--block", "--port", address.rpartition(":")[2]),
                *("--node-ip-address", "127.0.0.1", "--temp-dir", sessions),
                *("--num-cpus", "10", "--include-dashboard", "false", "--disable-usage-stats"),
                *("--object-store-memory", "80000000"),
            ],
            env=os.environ | {"HF_HOME": str(tmp_path / "node")},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert node.stdout is not None
        for line in node.stdout:
            if "Ray runtime started" in line:
                break
        yield address
        node.terminate()
        node.communicate()


@pytest.mark.long
def test_nodes_of_ray_download_for_themselves(
    ray_node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher has the configuration, the node of the worker has the weights."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "launcher"))
    flags = ("--backend", "ray", "--address", ray_node, "--model", NAME)
    with Pipeline(*flags, endpoint=f"tcp://127.0.0.1:{free_port()}") as pipeline:
        assert pipeline.wait_for("ready: ").startswith(f"ready: {NAME} on ")
        assert pipeline.run("ask", "17+25=").stdout == "42\n"
    for folder, files in (("launcher", ["config.json"]), ("node", ["config.json", WEIGHTS])):
        found = [one.name for one in (tmp_path / folder).glob("hub/models--*/snapshots/*/*")]
        assert sorted({"config.json", WEIGHTS} & set(found)) == files
