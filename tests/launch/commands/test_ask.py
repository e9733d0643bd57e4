"""`launch ask` and `launch chat`: what they send of their input, and what they print."""

import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.launch.commands import client
from penstock.protocol.messages.client import GenerateRequest, Reply, Request, StatusRequest
from penstock.protocol.messages.status import StatusReply
from tests.launch.fake_gateway import STATUS, Gateway, delta, echo, gateway, reply

pytestmark = pytest.mark.timeout(60)
Launch = Callable[..., subprocess.CompletedProcess[str]]


def say_yes(request: Request) -> list[Reply]:
    """Answers with `yes`; `silence` gets no answer, and `half` a stream without an end."""
    match request:
        case GenerateRequest(messages=[*_, last]) if last.content == "silence":
            return []
        case GenerateRequest(messages=[*_, last]) if last.content == "half":
            return [delta(request, 0, 3)]
        case GenerateRequest():
            return [reply(request, "yes")]
        case StatusRequest():
            return [StatusReply(ready=True, name="a-model", **STATUS)]
    return echo(request)


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[Gateway]:
    with gateway(f"ipc://{tmp_path}/clients", say_yes) as running:
        yield running


@pytest.fixture
def launch(heard: Gateway, tmp_path: Path) -> Launch:
    """Return a function that runs a command of the gateway's clients."""
    assert not heard.heard

    def run(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        where = ("--endpoint", f"ipc://{tmp_path}/clients")
        command = [sys.executable, "-P", "-m", "penstock.launch", *words, *where]
        return subprocess.run(command, capture_output=True, check=False, **options)

    return run


def contents(gateway: Gateway) -> list[list[str]]:
    """Return the texts of the messages of each request."""
    asked = [request for request in gateway.heard if isinstance(request, GenerateRequest)]
    return [[str(message.content) for message in request.messages or ()] for request in asked]


@pytest.mark.parametrize(
    ("words", "given", "expected"),
    [
        (["ask", "Hi"], b"", ["Hi"]),
        (["ask"], b"Hi\n", ["Hi"]),
        (["ask", "Sum up:"], b"a\n\nb\r\n", ["Sum up:\n\na\n\nb"]),
        (["ask", "--system", "Be brief."], "\ufeffä\n".encode(), ["Be brief.", "ä"]),
        (["ask", "--temperature", "0", "Hi", "--timeout", "50"], b"", ["Hi"]),
    ],
)
def test_a_question_is_an_argument_and_the_input(
    launch: Launch, heard: Gateway, words: list[str], given: bytes, expected: list[str]
) -> None:
    done = launch(*words, input=given)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"yes\n", b"")
    assert contents(heard) == [expected]


@pytest.mark.parametrize(
    ("words", "given", "sentence"),
    [
        (["ask"], b"", "question: got nothing, expected an argument or text on standard input"),
        (["ask"], b"\r\n\n", "question: got nothing, expected"),
        (["ask", "x"], b"a\xffb", "standard input: got byte 0xff at 1, expected text in UTF-8"),
        (["ask", "--raw", "--system", "s"], b"x", "--system: got it with --raw, expected one"),
        (["ask", "x", "--timeout", "-1"], b"", "--timeout: got '-1', expected a number of sec"),
        (["ask", "x", "--timeout", "nan"], b"", "--timeout: got 'nan', expected a number of sec"),
        (["chat"], b'"""\na\n', '""": got the end of the input, expected """'),
    ],
)
def test_an_input_that_is_refused(
    launch: Launch, heard: Gateway, words: list[str], given: bytes, sentence: str
) -> None:
    done = launch(*words, input=given)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.decode().startswith(f"launch: {sentence}")
    assert contents(heard) == []


def test_an_input_may_be_longer_than_a_pipe_and_is_limited(
    launch: Launch, heard: Gateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert launch("ask", input=b"x" * 300_000).returncode == 0
    assert contents(heard) == [["x" * 300_000]]
    monkeypatch.setattr(client, "MAX_BYTES", 4)
    (tmp_path / "input").write_bytes(b"12345")
    before, file = os.dup(0), os.open(tmp_path / "input", os.O_RDONLY)
    try:
        os.dup2(file, 0)
        with pytest.raises(client.LaunchError, match="standard input: got more than"):
            client.read_input()
    finally:
        os.dup2(before, 0)
        os.close(before)
        os.close(file)


def test_a_terminal_is_not_read(launch: Launch, heard: Gateway) -> None:
    """Nobody writes to it: a command that read it would wait for ever."""
    ours, terminal = pty.openpty()
    assert launch("ask", "Hi", stdin=terminal).stdout == b"yes\n"
    refused = launch("ask", stdin=terminal)
    assert (refused.returncode, refused.stdout) == (2, b"")
    assert contents(heard) == [["Hi"]]
    os.close(ours)
    os.close(terminal)


def test_a_silent_pipe_is_reported(heard: Gateway, tmp_path: Path) -> None:
    words = ["ask", "--endpoint", f"ipc://{tmp_path}/clients"]
    command = [sys.executable, "-P", "-m", "penstock.launch", *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as asked:
        assert asked.stderr
        assert asked.stderr.readline().startswith(b"launch: reading the standard input to its end")
        asked.communicate(b"Hi")
    assert (asked.returncode, contents(heard)) == (0, [["Hi"]])


@pytest.mark.parametrize(("question", "printed"), [(b"silence", b""), (b"half", b"one\n")])
def test_a_timeout_ends_the_wait(launch: Launch, question: bytes, printed: bytes) -> None:
    done = launch("ask", "--timeout", "0.5", input=question)
    assert (done.returncode, done.stdout) == (1, printed)
    assert done.stderr == b"launch: no whole answer within 0.5 s\n"


def test_a_conversation(launch: Launch, heard: Gateway) -> None:
    lines = (
        *("one", "", '"""two', ' three"""', '"""four"""', "/unknown", "/usr/bin what?"),
        *("/help", "/clear", "five", "/help foo", "/exit now", "/system hi"),
        *('"""/system hi"""', "/exit", "six"),
    )
    done = launch("chat", "--system", "Be brief.", input="\n".join(lines).encode())
    assert (done.returncode, done.stdout) == (0, b"yes\n" * 6)
    first = ["Be brief.", "one", "yes", "two\n three", "yes", "four", "yes", "/usr/bin what?"]
    second = ["Be brief.", "five", "yes", "/system hi"]
    assert contents(heard)[3:] == [first, second[:2], second]
    assert done.stderr.startswith(b"unknown command /unknown; /help lists them\n/clear ")
    assert done.stderr.endswith(
        b"got '/help foo', expected /help alone\ngot '/exit now', expected /exit alone\n"
        b"unknown command /system; /help lists them\n"
    )


def test_a_terminal_is_told_the_model_and_how_to_leave(launch: Launch) -> None:
    ours, terminal = pty.openpty()
    os.write(ours, b"\x04")
    done = launch("chat", stdin=terminal)
    assert done.stderr == b"a-model; /help lists the commands, Ctrl-D leaves\n"
    assert done.returncode == 0
    os.close(ours)
    os.close(terminal)
