"""The command line."""

import json
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from penstock.launch.commands import cli, client, gpus
from penstock.launch.commands.start import start
from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.procfile import PROCFILE
from penstock.protocol.config import Config
from tests.launch.conftest import Launch
from tests.launch.fake_gateway import gateway

SERVE = ("bench", "serve")
LONG = f"/{'a' * 300}"  # no file can have this name
SLOW_MODULES = ("asyncio", "psutil", "torch", "transformers", "zmq")


def test_it_starts_without_what_it_does_not_need() -> None:
    code = (
        "import sys; sys.argv = ['launch', '--help']\n"
        "from penstock.launch.commands.cli import main\n"
        "try: main()\n"
        f"finally: assert not set({SLOW_MODULES}) & set(sys.modules), set(sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["all", "--tp", "0"], "--tp: got '0', expected `int` >= 1"),
        (["all", "--tp", "banana"], "--tp: got 'banana', expected `int`"),
        (["all", "--device", "gpu"], "--device: got 'gpu', expected one of auto, cpu, cuda"),
        (["all", "--model", "/none"], "--model: got '/none', expected an existing"),
        (["serve", "--tp", "2", "/none"], "--model: got '/none', expected an existing"),
        (["all", "--model", "/"], "--model: / has no config.json; a checkpoint needs it"),
        (["all", "--procfile", "/none"], "--procfile: /none can't be read"),
        (["all", "--endpoint", "tcp://*:5555"], "--endpoint tcp://*:5555 may be reached"),
        (["all", "--endpoint", "127.0.0.1:5"], "did you mean tcp://127.0.0.1:5?"),
        (["all", "--max-num-seq", "4"], "unknown option '--max-num-seq' (did you mean '--max-num-"),
        (["all", "--max_num_seqs=4"], "(did you mean '--max-num-seqs'?); `launch all --help`"),
        (["all", "--tensor-parallel-size", "2"], "(did you mean '--tp'?)"),
        (["nonsense"], "unknown command 'nonsense'; `launch --help` lists them all"),
        (["stats"], "unknown command 'stats' (did you mean 'status'?)"),
        (["help", "bench", "ofline"], "unknown command 'ofline' (did you mean 'offline'?)"),
        (["--nonsense", "2"], "unknown option '--nonsense'; `launch --help`"),
        (["--tp", "2", "all"], "option '--tp' belongs after the command: `launch COMMAND --tp`"),
        (["--name", "none", "--tp", "2", "ask", "hi"], "option '--tp' belongs after the command"),
        (["--name=none", "stop"], "no pipeline 'none' runs"),
        (["--name", "none", "stop", "--name", "other"], "no pipeline 'other' runs"),
        (["status", "--name", "none"], "no pipeline 'none' runs"),
        (["ask", "--name", "none", "x"], "no pipeline 'none' runs"),
        (["worker", "--name", "none"], "no pipeline 'none' runs"),
        (["scale", "http", "0", "--name", "none"], "no pipeline 'none' runs"),
        (["scale", "worker", "2"], "kind: got 'worker', expected one of tokenizer, "),
        (["scale", "tokenizer", "0"], "number: got 0, expected at least 1 tokenizer"),
        (["scale", "http", "-1"], "number: got -1, expected at least 0 http"),
        (["scale", "http", "x"], "number: got 'x', expected an integer"),
        (["completion", "csh"], "SHELL: got 'csh', expected one of bash, zsh, fish"),
        (["keys", "/none/keys"], "keys can't be made in /none/keys: No such file or directory"),
        (["keys", "/none", "--client", "a/b"], "--client: got 'a/b', "),
        (["ask", "--logit-bias", "[]", "x"], "--logit-bias: got '[]', expected `object`"),
        (["ask", "--top-p", "2", "x"], "--top-p: got '2', expected `float` <= 1.0"),
        (["ask", "a", "b"], "unrecognized arguments: b"),
        (["ask", "\udcff"], "got '\\udcff', expected text in UTF-8"),
        (["ask", "x", "--endpoint", "foo"], "--endpoint: got 'foo', expected tcp://HOST:PORT or"),
        (["chat", "--endpoint", "tcp://x"], "--endpoint: got 'tcp://x', expected tcp://HOST:PORT"),
        (["ask", "x", "--endpoint", "tcp://a.invalid:5"], "expected a host that can be reso"),
        (["ask", "x", "--endpoint", "tcp://a..b:5,tcp://[a.invalid]:5"], "expected a host that "),
        (["ask", "x", "--endpoint", "ipc:///x", "--curve-keys", "/none"], "can't be read"),
        (["models", "/", "/none", "--json"], "FOLDER: got /none, expected an existing folder"),
        (["batch", "/dev/null", "/dev/full"], "OUT.jsonl: got /dev/full, expected a file, which"),
        (["batch", "in", "out", "--concurrency", "0"], "--concurrency: got 0, expected 1 or more"),
        (["serve", LONG], f"--model: got '{LONG}', expected an existing folder"),
        (["batch", "in", LONG], "no pipeline"),
        (["bench", "make-model", "0.6B", LONG], f"FOLDER: {LONG} can't be made: File name too"),
        (["ask", "x", "--endpoint", f"ipc://{LONG}"], "got a path of 301 bytes, expected at most"),
        (["bench"], "SUBJECT: got nothing, expected a value"),
        (["bench", "pipeline", "--tp", "2"], "unknown option '--tp'; `launch bench pipeline --"),
        (["bench", "latency", "--batches", "1", "0"], "--batches: got '0', expected `int` >= 1"),
        (["bench", "latency", "--name", "x", "--tp", "2"], "--tp is for a pipeline that is yet"),
        (["bench", "latency", "--endpoint", "ipc:///x"], "--endpoint needs --model"),
        (["bench", "offline", "--max-tokens", "9"], "--min-tokens is 100: more than --max-tokens"),
        (["bench", "offline", "--model", "/none"], "--model: got '/none', expected an existing"),
        (["bench", "offline", "--name", "none"], "no pipeline 'none' runs"),
        (["bench", "make-model", "7B", "/none"], "SIZE: got '7B', expected one of 0.6B, 1.7B"),
        (["bench", "make-model", "8B", "/proc/x"], "FOLDER: /proc/x can't be made: No such file"),
        ([*SERVE, "--base-url", "x"], "--base-url: x/: Request URL is missing an"),
        ([*SERVE, "--base-url", "http://a", "--tp", "2"], "--tp: got it with --base-url"),
        ([*SERVE, "--base-url", "http://127.0.0.1:9"], "--base-url: http://127.0.0.1:9: All conn"),
        ([*SERVE, "--request-rate", "0"], "--request-rate: got '0', expected `float` > 0.0"),
        ([*SERVE, "--request-rate", "inf"], "--request-rate: got 'inf', expected"),
        ([*SERVE, "--long-share", "2"], "--long-share: got '2', expected `float` <= 1.0"),
        ([*SERVE, "--num-requests", "0"], "--num-requests: got '0', expected `int` >= 1"),
        ([*SERVE, "--goodput", "itl:5"], "--goodput: 'itl:5' is none of ttft, tpot, e2el with :"),
        ([*SERVE, "--goodput", "ttft:-5"], "--goodput: got '-5', expected a finite number above 0"),
        (["chaos", "--kills", "0"], "--kills: got '0'"),
        (["chaos", "--stop-share", "1.5"], "--stop-share: got '1.5'"),
        (["chaos", "--only", "nothing"], "--only: got 'nothing', expected one of gateway"),
        (["chaos", "--mix", "nothing"], "--mix: got 'nothing', expected one of plain"),
        (["chaos", "--name", "x", "--tp", "2"], "--tp is for a pipeline that is yet to start"),
        (["chaos", "--name", "nobody"], "no pipeline 'nobody' runs"),
        (["chaos", "--model", "/nowhere"], "--model: "),
    ],
)
def test_what_is_refused_is_one_sentence(launch: Launch, words: list[str], sentence: str) -> None:
    out, err = launch(*words, code=2)
    assert err.startswith("launch: ")
    assert sentence in err
    assert (out, err.count("\n")) == ("", 1)


@pytest.mark.parametrize(
    ("arguments", "codes"),
    [
        (["all"], (0, 0)),
        (["--name", "x", "all", "--tp", "2"], (0, 0)),
        (["serve", "all"], (0, 0)),
        (["ask", "all"], (130, 143)),
        (["bench", "latency"], (130, 143)),
    ],
)
def test_signals(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, arguments: list[str], codes: tuple[int, int]
) -> None:
    """A pipeline that does not run yet is stopped as one that runs; other commands fail."""
    before = signal.getsignal(signal.SIGTERM)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, code in zip((signal.SIGINT, signal.SIGTERM), codes, strict=True):
        monkeypatch.setattr(cli, "_run", lambda _, number=number: signal.raise_signal(number))
        launch(*arguments, code=code)
    signal.signal(signal.SIGTERM, before)
    signal.signal(signal.SIGINT, handler)


def test_a_question_waits_for_a_gateway_and_reports_it(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/clients"
    ask = ["ask", "--raw", "--json", "hello", "--endpoint", endpoint]
    command = [sys.executable, "-P", "-m", "penstock.launch", *ask]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as asked:
        assert asked.stderr
        sentence = f"launch: waiting for {endpoint}: nothing answers there yet\n"
        assert asked.stderr.readline().decode() == sentence
        with gateway(endpoint):
            printed, reported = asked.communicate(timeout=60)
    assert (asked.returncode, json.loads(printed)["text"], reported) == (0, "hello", b"")


def test_a_waiting_client_reports_once_and_aborts_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(client, "SILENCE", 0.01)
    with client.WaitingClient(f"ipc://{tmp_path}/none", None, "client") as waiting:
        stream = waiting.submit("hello")
        for _ in range(3):
            waiting.wait()
        stream.abort()
    assert capsys.readouterr().err.count("\n") == 1


def test_alone_it_says_what_to_do_first(launch: Launch) -> None:
    assert "launch serve MODEL" in launch().out


def test_version(launch: Launch) -> None:
    assert launch("--version", "all").out == f"penstock {version('penstock-llm')}\n"


@pytest.mark.parametrize(
    ("command", "own"),
    [("batch", "--concurrency"), ("bench serve", "--request-rate"), ("chaos", "--kills")],
)
def test_help_has_the_commands_own_options_first(launch: Launch, command: str, own: str) -> None:
    usage, _, rest = launch(*command.split(), "--help").out.partition("\n\n")
    assert usage.startswith(f"usage: launch {command} [options]")
    assert "--" not in usage
    before, _, after = rest.partition("options of the pipeline that it starts:")
    assert own in before
    assert "--tp" not in before
    assert "--tp" in after


@pytest.mark.parametrize(
    "usage", ["ask [options] [question]", "serve [options] [MODEL]", "batch [options] IN.jsonl OUT"]
)
def test_the_usage_line_has_optional_positionals_in_brackets(launch: Launch, usage: str) -> None:
    assert launch(usage.split()[0], "--help").out.startswith(f"usage: launch {usage}")


@pytest.mark.parametrize("command", [[], ["ask"], ["bench", "serve"]])
def test_help_is_a_command(launch: Launch, command: list[str]) -> None:
    assert launch("help", *command) == launch(*command, "--help")


def test_cuda_without_a_gpu_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(LaunchError, match=r"--device cuda: .*--device cpu"):
        start(Config(device="cuda"), PROCFILE, 5)


@pytest.mark.parametrize(
    ("visible", "physical", "expected"),
    [
        *((None, 8, 8), (None, None, None), ("0,3", 8, 2), ("0,1", 1, 1), ("0,1", None, None)),
        *(("", 8, 0), ("MIG-a,MIG-b", 1, 2)),
    ],
)
def test_gpus_that_a_process_sees(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, physical: int | None, expected: int | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = None if physical is None else [gpus.Gpu("NVIDIA L4", 1)] * physical
    monkeypatch.setattr(gpus, "physical_gpus", lambda: found)
    assert gpus.num_gpus() == expected
    monkeypatch.setattr(gpus, "version", lambda _: "2.13.0")
    config = Config(device="cuda", tp=2)
    if expected is not None and expected < 2:
        with pytest.raises(LaunchError, match=f"need 2 GPUs, and this process has {expected}"):
            gpus.check_gpus(config)
    else:
        gpus.check_gpus(config)
