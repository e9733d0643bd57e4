"""Attacks by clients. Each is bounded, and goes to loopback only."""

import contextlib
import os
import signal
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import zmq

from penstock.launch.chaos.victim import ANSWER_TIMEOUT, Attack, Victim
from penstock.protocol.client.client import Stream
from penstock.protocol.client.errors import RequestError
from penstock.protocol.messages.client import GenerateRequest, StatusRequest, TokenizePromptRequest
from penstock.protocol.messages.structured import StructuredOutputs

POISON = "☠"
POISON_WORKER = """
import os, signal
from penstock.protocol.messages.packed import unpack
from penstock.services.worker import loading
from penstock.services.worker.start import main
def load(*given):
    runner = loading.load(*given)
    launch = runner.launch
    def launch_or_die(plan):
        if any("☠".encode()[0] in unpack(row.token_ids) for row in plan.added):
            os.kill(os.getpid(), signal.SIGKILL)
        return launch(plan)
    runner.launch = launch_or_die
    return runner
main(load)
"""


@Attack("first grammars")
def grammar(victim: Victim) -> None:
    """Several first grammars at once."""
    with victim.client() as client:
        schema = StructuredOutputs(json={"type": "object", "properties": {"a": {"type": "array"}}})
        answers = [
            client.submit("repeat: {}", structured_outputs=schema, max_tokens=20) for _ in range(4)
        ]
        for one in answers:
            one.result()


@Attack("poison of workers", programs={"worker": (POISON_WORKER, "")})
def poison_worker(victim: Victim) -> str:
    """Send a request that kills every worker, twice, and another one."""
    with victim.client() as client:
        return _refusals(client.submit, [f"repeat: {POISON}"] * 2 + [f"repeat: a {POISON}"])


@Attack("poison of tokenizers")
def poison_tokenizer(victim: Victim) -> str:
    """Tools with one long text, which a template renders slowly, twice."""
    tools = [{"type": "function", "function": {"name": "f", "description": "x " * 400_000}}]
    messages = [{"role": "user", "content": "?"}]
    with victim.client() as client:
        asked = [{"messages": messages, "tools": tools, "max_tokens": 1}] * 2
        return _refusals(lambda one: client.submit(**one), asked)


@Attack("deep JSON, scheduler killed")
def deep_json(victim: Victim) -> None:
    """Send requests nested as deep as decoders allow; then the scheduler dies."""
    with _dealer(victim) as dealer:
        for depth in (60, 200, 500, 900, 990):
            for text in (b'{"a":' * depth + b"1" + b"}" * depth, b"[" * depth + b"]" * depth):
                kwargs = b'{"x":' + text + b"}"
                message = b'{"messages":[{"role":"user","content":"?"}],"chat_template_kwargs":'
                dealer.send(message + kwargs + b',"max_tokens":400,"ignore_eos":true}')
        victim.kill("scheduler")
        victim.check()


@Attack("envelopes")
def envelopes(victim: Victim) -> None:
    """Multipart messages, mostly of envelope; and one of frames without an end."""
    with _dealer(victim, SNDHWM=4) as dealer:
        for _ in range(30):
            with contextlib.suppress(zmq.Again):
                dealer.send_multipart([bytes(4 << 20)] * 3 + [b'{"type":"status"}'])
    with socket.create_connection(("127.0.0.1", victim.port)) as raw:
        raw.settimeout(5)
        with contextlib.suppress(OSError):
            _greet(raw)
            for _ in range(64):
                raw.sendall((b"\x01\xff" + bytes(255)) * 4000)
    victim.check()


@Attack("unread streams")
def unread(victim: Victim) -> None:
    """Streams with large frames before them, which nobody reads."""
    with _dealer(victim, RCVHWM=1) as dealer:
        question = GenerateRequest(prompt="count from 1 to 99", stream=True, ignore_eos=True)
        question.max_tokens = 400
        for number in range(60):
            dealer.send_multipart([bytes(1000), b"%d" % number, msgspec.msgpack.encode(question)])
        victim.check()


@Attack("abandoned tokenize")
def abandoned(victim: Victim) -> None:
    """Long prompts to tokenize, of clients that leave."""
    with _dealer(victim) as dealer:
        question = TokenizePromptRequest(prompt="word " * 190_000)
        for _ in range(30):
            dealer.send(msgspec.msgpack.encode(question))
    victim.check()


@Attack("status flood")
def status_flood(victim: Victim) -> None:
    """Questions for the scheduler's next report, while it is stopped."""
    pid = victim.pid("scheduler")
    frame = msgspec.msgpack.encode(StatusRequest(fresh=True))
    with _dealer(victim, SNDHWM=0) as dealer:
        os.kill(pid, signal.SIGSTOP)
        try:
            for _ in range(150_000):
                dealer.send(frame)
            time.sleep(3)
        finally:
            os.kill(pid, signal.SIGCONT)
        victim.check()


@Attack("idle connections")
def idle(victim: Victim) -> None:
    """Open silent connections, more than the default limit of descriptors."""
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
        for _ in range(1100):
            address = ("127.0.0.1", victim.port)
            stack.enter_context(socket.create_connection(address, timeout=2))
        victim.check()


@Attack("HTTP headers")
def headers(victim: Victim) -> str:
    """Send an endless head of an HTTP request."""
    with socket.create_connection(("127.0.0.1", victim.config.http_port), timeout=5) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        num_bytes = 0
        with contextlib.suppress(OSError):
            while num_bytes < 400 << 20:
                num_bytes += raw.send(b"x-%08d: " % num_bytes + b"y" * 8000 + b"\r\n")
    return f"{num_bytes >> 20} MiB of headers taken"


@Attack("slow HTTP connections")
def slow_connections(victim: Victim) -> str:
    """200 connections that send a byte a second of their requests."""
    with contextlib.ExitStack() as stack:
        raws = []
        for _ in range(200):
            with contextlib.suppress(OSError):
                address = ("127.0.0.1", victim.config.http_port)
                raws.append(stack.enter_context(socket.create_connection(address, timeout=2)))
        for letter in b"GET /":
            for raw in raws:
                with contextlib.suppress(OSError):
                    raw.send(bytes([letter]))
            time.sleep(1)
        with urllib.request.urlopen(
            f"http://127.0.0.1:{victim.config.http_port}/health", timeout=20
        ) as r:
            return f"/health {r.status} beside them"


@Attack("ZMTP 1.0")
def old_peers(victim: Victim) -> None:
    """Peers that speak ZMTP 1.0, a hundred of them with ten messages each."""
    for _ in range(100):
        address = ("127.0.0.1", victim.port)
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=5) as raw:
            raw.sendall(b"\x01\x00" + b'\x12\x00{"type":"status"}' * 10)
    victim.check()


@Attack("one identity twice")
def identities(victim: Victim) -> str:
    """Two clients of one ZeroMQ identity."""
    with _dealer(victim, IDENTITY=b"same") as one, _dealer(victim, IDENTITY=b"same") as two:
        for dealer in (one, two):
            dealer.send(b'{"type":"status"}')
        answers = [bool(dealer.poll(3000)) for dealer in (one, two)]
        victim.check()
    return f"{sum(answers)} of 2 answered"


@Attack("1,000 requests of one")
def greedy(victim: Victim) -> str:
    """One client with 1,000 requests, and another one with a single one."""
    # the first answers of so large a batch come together
    with victim.client(timeout=5 * ANSWER_TIMEOUT) as many, victim.client() as one:
        begin = time.monotonic()
        answers = [
            many.submit("count from 10 to 60", max_tokens=64, ignore_eos=True) for _ in range(1000)
        ]
        one.generate("count from 1 to 5")
        single = time.monotonic() - begin
        for answer in answers:
            answer.result()
    return f"the single request took {single:.1f} of {time.monotonic() - begin:.1f} s"


def _refusals(submit: Callable[[Any], Stream], asked: list[Any]) -> str:
    """Send requests one after the other, and return the result of each."""
    codes = []
    for one in asked:
        try:
            submit(one).result()
            codes.append("answered")
        except RequestError as error:
            codes.append(error.code)
    return ", ".join(codes)


def _greet(raw: socket.socket) -> None:
    """ZMTP 3.0 without security, as a DEALER."""
    raw.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    raw.recv(64)
    raw.sendall(b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER")


@contextlib.contextmanager
def _dealer(victim: Victim, **options: Any) -> "Iterator[zmq.Socket[bytes]]":
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        for option, value in ({"SNDTIMEO": 10_000} | options).items():
            dealer.setsockopt(getattr(zmq, option), value)
        dealer.connect(victim.config.endpoint)
        yield dealer
