"""The pipeline on the CPU without pidfds, prctl, /proc, abstract sockets and other calls of Linux.

They are hidden from Python, psutil excepted; macOS itself is not here.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from penstock.launch.pipeline.run_folder import claim
from penstock.protocol.config import Config
from penstock.protocol.messages.structured import StructuredOutputs
from tests.pipeline.conftest import STOP_TIMEOUT, Pipeline
from tests.pipeline.ports import free_port

pytestmark = pytest.mark.pipeline
WITHOUT = Path(__file__).with_name("without_linux")
CHECK = """
import ctypes, os, signal, socket
assert not hasattr(os, "pidfd_open") and not hasattr(socket, "TCP_INFO")
assert not hasattr(ctypes.CDLL(None), "prctl")
"""
OWNER = """
import sys, time
from penstock import LLM, SamplingParams
llm = LLM(device="cpu", num_threads=1, kv_cache_gib=0.1)
print(llm.generate("17+25=", SamplingParams(max_tokens=8), use_tqdm=False)[0].outputs[0].text)
sys.stdout.flush()
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _without_linux(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide them, in a folder that no pipeline of another test sweeps."""
    monkeypatch.setenv("PYTHONPATH", str(WITHOUT))
    subprocess.run([sys.executable, "-P", "-c", CHECK], check=True)
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield


def gone(processes: list[psutil.Process]) -> bool:
    """Wait for the end of processes; return whether all have ended."""
    return not psutil.wait_procs(processes, timeout=STOP_TIMEOUT)[1]


@pytest.mark.long
def test_a_pipeline_serves_restarts_and_stops() -> None:
    port = str(free_port())
    flags = ("--tp", "2", "--http", "1", "--http-port", port)
    with Pipeline(*flags, endpoint=f"tcp://127.0.0.1:{free_port()}") as pipeline:
        body = {"model": "qwen3-demo", "prompt": "17+25=", "max_tokens": 8}
        url = f"http://127.0.0.1:{port}/v1/completions"
        answer = httpx.post(url, json=body, trust_env=False, timeout=30).json()
        assert answer["choices"][0]["text"] == "42"
        assert pipeline.run("ask", "17+25=").stdout == "42\n"
        with pipeline.client() as client:
            constraint = StructuredOutputs(regex="[a-c]{3}")
            text = client.generate("17+25=", max_tokens=8, structured_outputs=constraint).text
            assert len(text) == 3
        pipeline.kill("worker.2")  # its replacement waits for the end of the group
        assert pipeline.run("restart", "detokenizer").returncode == 0
        assert pipeline.run("ask", "count from 3 to 9").stdout == "3 4 5 6 7 8 9\n"
        # psutil without pidfds sees the end of what was collected
        collector = threading.Thread(target=pipeline.process.wait)
        collector.start()
        assert pipeline.run("stop").returncode == 0
        collector.join()


def test_processes_end_with_a_killed_supervisor() -> None:
    pipeline = Pipeline()
    pipeline.wait_for("ready: ")
    children = psutil.Process(pipeline.process.pid).children(recursive=True)
    assert len(children) > 3
    pipeline.process.kill()
    pipeline.process.wait()  # as above
    assert gone(children)
    pipeline.wait()
    assert pipeline.run_folder.exists()
    with claim(Config(name=f"{pipeline.name}-next")):  # any next pipeline removes its files
        assert not pipeline.run_folder.exists()
    assert not Path(pipeline.endpoint.removeprefix("ipc://")).exists()


@pytest.mark.long
def test_a_pipeline_ends_with_its_killed_owner() -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "42\n"
        children = psutil.Process(owner.pid).children(recursive=True)
        assert len(children) > 4
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        assert gone(children)
