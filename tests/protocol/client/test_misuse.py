"""Clients that are not closed, shared by threads, used after a fork, or not connected."""

import subprocess
import sys
import threading

import pytest

from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.client.client import Client
from penstock.protocol.client.session import ClientError
from tests.launch.fake_gateway import gateway
from tests.protocol.client.conftest import TIMEOUT

COLLECTED = """
import gc, sys
from penstock import Client
client = Client(sys.argv[1])
client.itself = client
print(client.generate("a").text)
del client
gc.collect()
print(Client(sys.argv[1]).generate("b").text)
"""
FORKED = """
import os, sys
from penstock import Client, ClientError
client = Client(sys.argv[1])
print(client.generate("a").text, flush=True)
pid = os.fork()
if pid:
    os.waitpid(pid, 0)
try:
    print(client.generate("b").text)
except ClientError as error:
    print(error)
    del client
"""


def run(code: str, endpoint: str) -> list[str]:
    """Return what a program prints."""
    with gateway(endpoint):
        done = subprocess.run(
            [sys.executable, "-c", code, endpoint],
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=True,
        )
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_an_unclosed_client_is_collected(endpoint: str) -> None:
    """Also in a cycle, where the collector would end the context before its sockets."""
    assert run(COLLECTED, endpoint) == ["a", "b"]


def test_a_client_after_a_fork(endpoint: str) -> None:
    """The child's end leaves the parent's client as it was."""
    refusal = "this client was made before a fork: make another one in the new process"
    assert run(FORKED, endpoint) == ["a", refusal, "b"]


def test_a_client_in_two_threads_at_once(endpoint: str) -> None:
    is_in_use, may_end = threading.Event(), threading.Event()

    def use(client: Client) -> None:
        with client._connection.used():
            is_in_use.set()
            may_end.wait(TIMEOUT)

    with gateway(endpoint), Client(endpoint, timeout=TIMEOUT) as client:
        thread = threading.Thread(target=use, args=(client,))
        thread.start()
        is_in_use.wait(TIMEOUT)
        for call in (lambda: client.generate("a"), client.wait, lambda: client.take_until(1e9)):
            with pytest.raises(ClientError, match="another thread is using this client"):
                call()
        may_end.set()
        thread.join()
        assert client.generate("a").text == "a"


def test_an_async_client_outside_of_its_block(endpoint: str) -> None:
    with pytest.raises(ClientError, match="enter it with `async with` first"):
        AsyncClient(endpoint).submit("a")
