"""The command line."""

import subprocess
import sys

import pytest

from penstock.launch.cli import main

SLOW_MODULES = ("asyncio", "circus", "psutil", "torch", "tornado", "transformers", "zmq")


def launch(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """The exit code of a command line."""
    monkeypatch.setattr(sys, "argv", ["launch", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


def test_it_starts_without_what_it_does_not_need() -> None:
    code = (
        "import sys; sys.argv = ['launch', 'options']\n"
        "from penstock.launch.cli import main\n"
        "try: main()\n"
        f"finally: assert not set({SLOW_MODULES}) & set(sys.modules), set(sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["all", "--tp", "0"], "--tp is '0': expected `int` >= 1"),
        (["all", "--model", "/none"], "--model: model folder /none does not exist"),
        (["all", "--procfile", "/none"], "procfile /none can't be read"),
        (["all", "--endpoint", "tcp://*:5555"], "--endpoint tcp://*:5555 may be reached"),
        (["keys", "/none/keys"], "keys can't be made in /none/keys: No such file or directory"),
        (["keys", "/none", "--client", "a/b"], "--client is 'a/b': "),
        (["scale", "worker", "2"], "'worker' can't be scaled; tokenizer, detokenizer and http can"),
        (["scale", "tokenizer", "0"], "number is 0: a pipeline needs 1 tokenizer"),
        (["scale", "http", "-1"], "number is -1: a pipeline needs 0 http"),
        (["scale", "http", "0", "--name", "none"], "no pipeline 'none' runs"),
        (["status", "--name", "none"], "no pipeline 'none' runs"),
        (["stop", "--name", "none"], "no pipeline 'none' runs"),
        (["ask", "--name", "none", "x"], "no pipeline 'none' runs"),
        (["worker", "--name", "none"], "no pipeline 'none' runs"),
        (["ask", "--logit-bias", "[]", "x"], "--logit-bias is '[]': expected `object`"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["ask", "--top-p", "2", "x"], "--top-p is '2': expected `float` <= 1.0"),
        (["bench"], "required: SUBJECT"),
        (["bench", "pipeline", "--tp", "2"], "unrecognized arguments: --tp 2"),
        (["bench", "latency", "--batches", "1", "0"], "--batches: '0' is no number from 1 on"),
        (["bench", "offline", "--max-tokens", "9"], "--min-tokens is 100: more than --max-tokens"),
        (["bench", "offline", "--tp", "0"], "--tp is '0': expected `int` >= 1"),
        (["bench", "offline", "--model", "/none"], "--model: model folder /none does not exist"),
        (["bench", "offline", "--name", "none"], "no pipeline 'none' runs"),
        (["bench", "latency", "--name", "x", "--tp", "2"], "--tp is for a pipeline that is yet"),
        (["bench", "latency", "--endpoint", "ipc:///x"], "--endpoint needs --model"),
    ],
)
def test_what_is_refused_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    sentence: str,
) -> None:
    assert launch(monkeypatch, *arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("launch: ")
    assert sentence in printed.err
    assert (printed.out, printed.err.count("\n")) == ("", 1)
