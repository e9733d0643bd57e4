"""Several HTTP processes on one port: what each does, and what the death of one breaks."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.pipeline.conftest import START_TIMEOUT, Pipeline
from tests.pipeline.disturbed.test_leases import wait_for_requests
from tests.pipeline.http_api import KEY

pytestmark = pytest.mark.pipeline
HEADERS = {"Authorization": f"Bearer {KEY}"}
LONG = {"prompt": "count from 1 to 100", "max_tokens": 250, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def served(disturbed: Pipeline) -> Iterator[tuple[Pipeline, str]]:
    assert disturbed.run("scale", "http", "2").returncode == 0
    disturbed.wait_for(r"http\.2 +\| .* I http:.* is open")
    yield disturbed, disturbed.url
    assert disturbed.run("scale", "http", "1").returncode == 0


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", headers=HEADERS, timeout=START_TIMEOUT).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


async def stream(url: str, started: asyncio.Event) -> str:
    """Return the text of a stream, each on a connection of its own. Raises httpx.TransportError."""
    text = ""
    async with (
        httpx.AsyncClient(timeout=START_TIMEOUT, headers=HEADERS) as client,
        client.stream("POST", f"{url}/v1/completions", json=LONG) as answer,
    ):
        async for line in answer.aiter_lines():
            started.set()
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    return text


async def streams(url: str, number: int, then: Callable[[], object]) -> list[str | BaseException]:
    """Run `number` streams at once; call `then` in the middle of them."""
    started = [asyncio.Event() for _ in range(number)]
    tasks = [asyncio.create_task(stream(url, one)) for one in started]
    await asyncio.gather(*(one.wait() for one in started))
    await asyncio.to_thread(then)
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_two_processes_share_the_work(served: tuple[Pipeline, str]) -> None:
    """Then one dies: only its connections break, and the sums are right."""
    pipeline, url = served
    restarts = pipeline.restarts()
    tokens = "penstock:generation_tokens_total"
    before = metric(url, tokens)
    whole = asyncio.run(streams(url, 4, lambda: None))
    assert len(set(whole)) == 1, whole
    assert metric(url, tokens) - before == 4 * LONG["max_tokens"]  # type: ignore[operator]
    ends = asyncio.run(streams(url, 8, lambda: pipeline.kill("http.1")))
    broken = [end for end in ends if isinstance(end, httpx.TransportError)]
    assert 0 < len(broken) < 8
    assert {end for end in ends if end not in broken} == set(whole)
    assert pipeline.restarts() == restarts | {"http.1": restarts["http.1"] + 1}
    wait_for_requests(pipeline, 0)  # the aborts of the broken streams are on their way


def test_sigterm_lets_answers_be_finished(served: tuple[Pipeline, str]) -> None:
    pipeline, url = served
    body = {"prompt": "count from 1 to 100", "max_tokens": 1000}
    begin = len(pipeline.output)
    killed = [name for name in ("http.1", "http.2") if name in pipeline.processes()]
    with httpx.Client(timeout=START_TIMEOUT, headers=HEADERS) as client:
        with client.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as one:
            lines = one.iter_lines()
            next(lines)
            with pipeline.suspended("worker.1"):
                for name in killed:
                    os.kill(pipeline.processes()[name], signal.SIGTERM)
                with pipeline.client() as other:
                    assert other.status().num_requests == 1
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        for name in killed:
            pipeline.wait_for(rf"{re.escape(name)} +\| .* I http:.* is open", begin)
        reply = client.post(f"{url}/v1/completions", json=body | {"prompt": "17+25="})
    assert reply.json()["choices"][0]["text"] == "42"


def test_there_is_always_a_listener_while_both_restart(served: tuple[Pipeline, str]) -> None:
    """The kernel may reset a handshake that ends between the last `accept` and `close`."""
    pipeline, url = served
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    with ThreadPoolExecutor(1) as thread:
        restart = thread.submit(pipeline.run, "restart", "http")
        while not restart.done():
            with (
                contextlib.suppress(ConnectionResetError),
                socket.create_connection(address, START_TIMEOUT) as connection,
            ):
                connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
    assert restart.result().stdout == "http.1: back\nhttp.2: back\n"


def test_an_answer_goes_on_where_the_gateway_dies(served: tuple[Pipeline, str]) -> None:
    pipeline, url = served
    text, *_ = asyncio.run(streams(url, 1, lambda: pipeline.kill("gateway.1")))
    assert isinstance(text, str), text
    assert text.startswith("1 2 3 4 5")
    assert httpx.get(f"{url}/health", timeout=START_TIMEOUT).status_code == 200


def test_health_names_the_stage_that_is_missing(served: tuple[Pipeline, str]) -> None:
    pipeline, url = served
    pid = pipeline.processes()["scheduler.1"]
    os.kill(pid, signal.SIGSTOP)
    try:
        answer = httpx.get(f"{url}/health", timeout=START_TIMEOUT)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert answer.status_code == 503
    assert "scheduler" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"] == "1"
