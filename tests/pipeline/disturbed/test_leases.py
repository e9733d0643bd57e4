"""Clients that resubmit, clients that disconnect, time limits: with real processes."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.messages.client import JSON, GenerateReply, GenerateRequest
from tests.pipeline.conftest import Pipeline
from tests.tools.demo.tasks import answer_to, count_prompt

pytestmark = pytest.mark.pipeline
ANSWER_TIMEOUT_MS = 60_000
PROMPT = count_prompt(1, 20)
UNKNOWN = [10, 11, 12]
"""a prompt whose answers depend on the draw"""


@pytest.fixture(scope="module")
def served(disturbed: Pipeline) -> Pipeline:
    return disturbed


@pytest.fixture
def req(served: Pipeline) -> Iterator["zmq.Socket[bytes]"]:
    """Yield a REQ socket that may ask again before it has an answer."""
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        for option in (zmq.REQ_RELAXED, zmq.REQ_CORRELATE):
            socket.setsockopt(option, 1)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, ANSWER_TIMEOUT_MS)
        socket.connect(served.endpoint)
        yield socket


def wait_for_requests(served: Pipeline, number: int) -> None:
    """Wait until the gateway has `number` open requests; each query waits for its answer."""
    with served.client() as client:
        while client.status().num_requests != number:
            pass


def wait_until_all_is_free(served: Pipeline) -> None:
    """Read the scheduler's reports, which come twice a second, until one has it idle."""
    with served.client() as client:
        while one := client.status(fresh=True).scheduler:
            if not one.num_running + one.num_waiting and one.num_free_blocks == one.num_blocks:
                break


@pytest.mark.parametrize("dies", [False, True])
def test_asked_again(served: Pipeline, req: "zmq.Socket[bytes]", dies: bool) -> None:
    """By a plain REQ socket: one reply, and the right one, though the gateway may die between."""
    frame = JSON.encode(GenerateRequest(prompt=PROMPT, request_id=f"again, {dies}"))
    with served.suspended("worker.1"):
        req.send(frame)
        wait_for_requests(served, 1)
        if dies:
            served.kill("gateway.1")
        req.send(frame)
        wait_for_requests(served, 1)
    reply = JSON.decode_reply(req.recv())
    assert isinstance(reply, GenerateReply)
    assert reply.text == answer_to(PROMPT)
    assert not req.poll(0)
    req.send(b'{"prompt": "17+25="}')
    reply = JSON.decode_reply(req.recv())
    assert isinstance(reply, GenerateReply)
    assert reply.text == "42"
    wait_until_all_is_free(served)


def test_requests_of_a_client_that_is_gone(served: Pipeline) -> None:
    """Without a worker they can't end by themselves."""
    with zmq.Context() as context, served.suspended("worker.1"):
        with context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(served.endpoint)
            for stream in (False, True):
                socket.send(JSON.encode(GenerateRequest(prompt=PROMPT, stream=stream)))
            wait_for_requests(served, 2)
        wait_for_requests(served, 0)
    wait_until_all_is_free(served)


def test_several_answers_of_a_gateway_that_dies(served: Pipeline) -> None:
    fields: dict[str, Any] = {"temperature": 2.0, "max_tokens": 40, "ignore_eos": True}
    with served.client() as client:
        expected = [client.generate(UNKNOWN, seed=5 + index, **fields).text for index in range(3)]
        assert len(set(expected)) == 3
        with served.suspended("worker.1"):
            streams = client.submit_n(UNKNOWN, n=3, seed=5, **fields)
            wait_for_requests(served, 3)
            served.kill("gateway.1")
        assert [one.result().text for one in streams] == expected
    wait_until_all_is_free(served)


def test_a_cancelled_task_ends_all_its_answers(served: Pipeline) -> None:
    async def cancel() -> None:
        async with AsyncClient(served.endpoint) as client:
            task = asyncio.ensure_future(client.generate_n(PROMPT, n=3))
            await asyncio.to_thread(wait_for_requests, served, 3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(wait_for_requests, served, 0)

    with served.suspended("worker.1"):
        asyncio.run(cancel())
    wait_until_all_is_free(served)


def test_a_time_limit(served: Pipeline) -> None:
    """Without a worker nothing comes."""
    with served.client() as client, served.suspended("worker.1"):
        reply = client.generate(PROMPT, timeout=0.1)
        assert (reply.finish_reason, reply.text) == ("abort", "")
    wait_until_all_is_free(served)


def test_the_shortest_time_limit_and_none(served: Pipeline) -> None:
    with served.client() as client:
        assert client.generate(PROMPT, timeout=5e-324).finish_reason == "abort"
        assert client.generate(PROMPT, timeout=float("inf")).text == answer_to(PROMPT)
