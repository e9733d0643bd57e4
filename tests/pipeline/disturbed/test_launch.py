"""`launch`, with real processes."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.launch.pipeline.procfile import PROCFILE
from penstock.protocol.client.client import Client
from penstock.protocol.config import Config, run_folder
from tests.pipeline.conftest import LAUNCH, START_TIMEOUT, Pipeline
from tests.pipeline.ports import free_port

pytestmark = pytest.mark.pipeline
Start = Callable[..., Pipeline]
QUESTION = "What is the sum of 2 and 3?"
THOUGHT_END = 260  # </think>
IN_THOUGHT = {"role": "assistant", "content": "<think>\n"}


@pytest.fixture(scope="module")
def main(disturbed: Pipeline) -> Pipeline:
    """Return the pipeline that most tests share."""
    return disturbed


def free_tcp_endpoint() -> str:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{trial.getsockname()[1]}"


def test_one_line_says_that_it_is_ready(main: Pipeline) -> None:
    line = main.wait_for("ready: ")
    where = re.escape(f"{main.endpoint} and {main.url}")
    assert re.fullmatch(rf"ready: Qwen3 demo on {where} \(tp 1, 6 processes, \d+\.\d s\)\n", line)


def test_log_lines_name_their_process(main: Pipeline) -> None:
    main.wait_for(r"scheduler\.1   \| \d\d-\d\d \d\d:\d\d:\d\d\.\d{3} I workers ready: worker\.1")
    names = {line.partition("|")[0].strip() for line in main.output if line[:6] != "ready:"}
    kinds = {name.partition(".")[0] for name in main.processes()}
    assert {name.partition(".")[0] for name in names} <= {*kinds, "launch"}


def test_ask_prints_the_text_and_nothing_else(main: Pipeline) -> None:
    asked = main.run("ask", QUESTION, "--max-tokens", "20")
    with main.client() as client:
        messages = [{"role": "user", "content": QUESTION}]
        reply = client.generate(messages=messages, max_tokens=20)
    assert (asked.returncode, asked.stderr) == (0, "")
    assert asked.stdout.rstrip("\n") == reply.text.rstrip("\n")


def test_ask_prints_the_reply_as_json(main: Pipeline) -> None:
    asked = main.run("ask", "--raw", "--json", "Once upon a time", "--max-tokens", "7")
    reply = json.loads(asked.stdout)
    assert reply["usage"]["output_tokens"] == len(reply["token_ids"]) <= 7


def test_ask_says_in_one_sentence_what_is_refused(main: Pipeline) -> None:
    asked = main.run("ask", QUESTION, "--max-tokens", "2000000000")
    assert (asked.returncode, asked.stdout) == (1, "")
    assert re.fullmatch(r"launch: max_tokens: got 2000000000.*\n", asked.stderr)


def test_chat_remembers(main: Pipeline) -> None:
    command = [*LAUNCH, "chat", "--name", main.name, "--max-tokens", "9", "--temperature", "0"]
    chat = subprocess.run(
        command, input="Hello\nHello\n", capture_output=True, text=True, timeout=60, check=False
    )
    with main.client() as client:
        messages = [{"role": "user", "content": "Hello"}]
        for _ in range(2):
            reply = client.generate(messages=messages, max_tokens=9, temperature=0)
            assert reply.text in chat.stdout
            messages += [{"role": "assistant", "content": reply.text}, messages[0]]
    assert (chat.returncode, chat.stderr) == (0, "")
    assert ">" not in chat.stdout, "a prompt sign is for a terminal"


def test_status_for_people(main: Pipeline) -> None:
    text = main.run("status").stdout
    assert text.startswith(f"{main.name}: ready, Qwen3 demo on {main.endpoint}\n")
    for name, pid in main.processes().items():
        assert re.search(rf"^{re.escape(name)} +{pid} +\d:\d\d:\d\d +\d+ ", text, re.MULTILINE)
    assert re.search(r"^KV blocks \d+ of [1-9]\d* in use", text, re.MULTILINE)


def test_status_for_programs(main: Pipeline) -> None:
    status = json.loads(main.run("status", "--json").stdout)
    assert status["gateway"]["ready"]
    assert status["config"]["name"] == main.name
    assert [one["name"] for one in status["processes"]] == [
        "gateway.1",
        "tokenizer.1",
        "scheduler.1",
        "worker.1",
        "detokenizer.1",
        "http.1",
    ]


@pytest.mark.parametrize(("kind", "number"), [("worker", "2"), ("gateway", "2"), ("x", "1")])
def test_scale_refuses_what_has_a_fixed_number(main: Pipeline, kind: str, number: str) -> None:
    refused = main.run("scale", kind, number)
    assert refused.returncode == 2
    expected = "expected one of tokenizer, detokenizer, http"
    assert refused.stderr == f"launch: kind: got {kind!r}, {expected}\n"


def test_scale_keeps_one(main: Pipeline) -> None:
    assert "at least 1 tokenizer" in main.run("scale", "tokenizer", "0").stderr
    assert "tokenizer.1" in main.processes()


@pytest.mark.parametrize(
    "name", ["tokenizer.1", "detokenizer.1", "scheduler.1", "gateway.1", "worker.1"]
)
def test_what_is_killed_comes_back_and_requests_go_on(main: Pipeline, name: str) -> None:
    before = main.restarts()
    with main.client() as client:
        whole = client.generate(QUESTION, max_tokens=300, ignore_eos=True)
        stream = client.stream(QUESTION, max_tokens=300, ignore_eos=True)
        deltas = iter(stream)
        pieces = [next(deltas).text]
        main.kill(name)
        pieces += [delta.text for delta in deltas]
        assert stream.result().text == whole.text == "".join(pieces)
    assert main.restarts() == before | {name: before[name] + 1}


def test_a_grammar_that_waits_for_the_thought_survives_its_worker(main: Pipeline) -> None:
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": "count from 1 to 60"}, IN_THOUGHT],
        "continue_final_message": True,
        "logit_bias": {THOUGHT_END: 12},  # likeliest where the count ends, for EOS is not allowed
        "structured_outputs": {"regex": "(yes|no){5}"},
        "temperature": 1.0,
        "seed": 3,
        "skip_special_tokens": False,
    }
    with main.client() as client:
        whole = client.generate(**fields)
        assert re.fullmatch(r"[\s\S]*1 2 3 4 5[\s\S]*60</think>(yes|no){5}", whole.text)
        num_before, start = num_generated(client), len(main.output)
        pid = main.processes()["worker.1"]
        deltas = iter(stream := client.stream(**fields))
        text = next(deltas).text
        os.kill(pid, signal.SIGKILL)
        main.wait_for(r"launch +\| .* worker.1 died", start)
        assert num_generated(client) - num_before < whole.token_ids.index(THOUGHT_END)
        text += "".join(delta.text for delta in deltas)
        assert stream.result().token_ids == whole.token_ids
        assert text == whole.text


def num_generated(client: Client) -> float:
    """Return the number of tokens that the pipeline has generated for all its clients."""
    metrics = client.status(metrics=True).metrics
    assert metrics
    return metrics.generation_tokens


def test_a_service_in_the_foreground_joins(main: Pipeline) -> None:
    command = [*LAUNCH, "detokenizer", "--name", main.name]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as joined:
        name = f"detokenizer.{joined.pid}"
        deadline = time.monotonic() + START_TIMEOUT
        while name not in main.status()["gateway"]["schedulers"][0]["detokenizers"]:
            assert joined.poll() is None
            assert time.monotonic() < deadline
        joined.terminate()
    assert joined.returncode == 0


def test_a_second_of_the_same_name_is_refused(main: Pipeline) -> None:
    second = main.run("all")
    assert second.returncode == 2
    assert second.stderr == (
        f"launch: a pipeline {main.name!r} runs already; --name gives another name\n"
    )
    assert main.run("ask", QUESTION, "--max-tokens", "1").returncode == 0


def test_an_endpoint_in_use_is_refused(main: Pipeline) -> None:
    name = f"test-{uuid.uuid4().hex[:8]}"
    command = [*LAUNCH, "all", "--name", name, "--endpoint", main.endpoint]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 2
    assert second.stderr == f"launch: --endpoint {main.endpoint} is in use; give another one\n"
    assert main.run("ask", QUESTION, "--max-tokens", "1").returncode == 0
    assert not run_folder(name).exists()


def test_two_pipelines_and_stop(main: Pipeline, pipeline: Start) -> None:
    other = pipeline("--tp", "2", endpoint=free_tcp_endpoint())
    assert "(tp 2, 6 processes" in other.wait_for("ready: ")
    children = other.children()
    texts = [one.run("ask", QUESTION, "--max-tokens", "20").stdout for one in (main, other)]
    assert texts[0] == texts[1] != ""
    assert other.run("stop").returncode == 0
    assert not other.run_folder.exists()
    assert other.wait() == 0
    assert not other.alive(children)
    assert main.status()["gateway"]["ready"]
    assert "no pipeline" in other.run("status").stderr


def test_a_process_that_dies_again_and_again_ends_the_pipeline(tmp_path: Path) -> None:
    procfile = tmp_path / "procfile"
    text = re.sub(
        "^worker: .*$",
        "worker: sh -c 'echo $0 last words; exit 3'",
        PROCFILE.read_text(),
        flags=re.MULTILINE,
    )
    procfile.write_text(text)
    name = f"test-{uuid.uuid4().hex[:8]}"
    command = [*LAUNCH, "all", "--name", name, "--procfile", str(procfile), "--http", "0"]
    command += ["--endpoint", free_tcp_endpoint()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stderr == (
        "launch: worker.1 died 3 times before it was ready, the last time with exit code 3; "
        "the pipeline stops. Its last lines:\n" + "  sh last words\n" * 3
    )
    assert not run_folder(name).exists()


def test_a_checkpoint_that_a_process_refuses_ends_the_pipeline(tmp_path: Path) -> None:
    """Only the tokenizer compiles the chat template."""
    folder = shutil.copytree(Config().model_folder, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% for one in messages %}")
    name = f"test-{uuid.uuid4().hex[:8]}"
    command = [*LAUNCH, "all", "--name", name, "--model", str(folder), "--http", "0"]
    command += ["--endpoint", free_tcp_endpoint()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    start = f"launch: tokenizer.1: the chat template of {folder} can't be read: Unexpected end of"
    assert ended.stderr.startswith(start)
    assert "Traceback" not in ended.stdout + ended.stderr
    assert "restarted" not in ended.stdout


def test_another_runner_runs_the_procfile() -> None:
    name = f"test-{uuid.uuid4().hex[:8]}"
    endpoint = free_tcp_endpoint()
    options = {"NAME": name, "ENDPOINT": endpoint, "TP": "2"}
    options |= {"NUM_THREADS": "1", "KV_CACHE_GIB": "0.1", "HTTP_PORT": str(free_port())}
    environment = os.environ | {f"PENSTOCK_{key}": value for key, value in options.items()}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [sys.executable, "-m", "honcho", "-f", str(PROCFILE), "start", "-c", "worker=2"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as honcho:
        try:
            asked = subprocess.run(
                [*LAUNCH, "ask", "--endpoint", endpoint, QUESTION, "--max-tokens", "20"],
                capture_output=True,
                text=True,
                timeout=START_TIMEOUT,
                check=False,
            )
            children = psutil.Process(honcho.pid).children(recursive=True)
        finally:
            honcho.terminate()
            shutil.rmtree(run_folder(name))  # without `launch` nobody else does
    assert (asked.returncode, asked.stderr) == (0, "")
    assert asked.stdout.strip()
    assert not Pipeline.alive(children)
