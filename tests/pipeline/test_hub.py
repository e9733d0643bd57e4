"""A pipeline of a model that is known by its name on a hub."""

from pathlib import Path

import httpx
import pytest

from penstock.launch.pipeline.ephemeral_pipeline import free_port
from penstock.protocol.config import Config
from tests.launch.pipeline.fake_hub import FakeHub
from tests.pipeline.conftest import Pipeline

pytestmark = pytest.mark.pipeline
NAME = "Qwen/Qwen3-demo"


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
        models = httpx.get(f"{url}/models", trust_env=False).json()
        assert [one["id"] for one in models["data"]] == [NAME]
        body = {"model": NAME, "prompt": "17+25=", "max_tokens": 8}
        answer = httpx.post(f"{url}/completions", json=body, trust_env=False).json()
        assert answer["choices"][0]["text"] == "42"
