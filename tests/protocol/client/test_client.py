"""Clients, with a gateway that sends the test's replies."""

import asyncio
import gc
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from penstock.launch.pipeline.keys import make_keys
from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.client.client import Client, Stream
from penstock.protocol.client.connection import Connection
from penstock.protocol.client.session import ClientError, NoAnswer, PendingRequest, RequestError
from penstock.protocol.messages.client import (
    MSGPACK,
    AbortRequest,
    ErrorReply,
    GenerateRequest,
    Reply,
    Request,
)
from penstock.protocol.transport.channel import OVERSIZE_SLACK
from penstock.protocol.transport.context import secure_server
from tests.launch.fake_gateway import TEXT, echo, gateway, reply
from tests.protocol.client.conftest import EACH_CHARACTER, HALF, TIMEOUT


def test_a_closed_client_says_so(endpoint: str) -> None:
    with gateway(endpoint, lambda _: []), Client(endpoint, timeout=TIMEOUT) as client:
        stream = client.submit("a")
    for call in (stream.result, client.status):
        with pytest.raises(ClientError, match="the client is closed; open another one"):
            call()


def test_what_comes_is_taken_in_until_a_moment(endpoint: str) -> None:
    with gateway(endpoint), Client(endpoint, timeout=TIMEOUT) as client:
        answer = client.submit("x")._answer
        for _ in range(500):
            moment = time.perf_counter() + 0.01
            client.take_until(moment)
            assert time.perf_counter() >= moment
            if answer.final:
                return
        pytest.fail("nothing was taken in")


def test_a_question_is_asked_once(endpoint: str) -> None:
    with Client(endpoint, timeout=TIMEOUT) as client:
        early = client.submit("before there is a gateway")
        with gateway(endpoint) as one:
            early.result()
            client.generate("after")
    assert len(one.heard) == 2


@pytest.mark.parametrize("unknown", ["the end of the last connection", "the next connection"])
def test_a_question_is_asked_once_where_a_change_is_not_known_yet(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, unknown: str
) -> None:
    with Client(endpoint, timeout=TIMEOUT) as client:

        def ask_blindly() -> Stream:
            with monkeypatch.context() as blind:
                blind.setattr(Connection, "take", lambda _: None)
                return client.submit("late")

        with gateway(endpoint):
            client.generate("x")
        if unknown == "the next connection":
            client.wait()  # until the connection is lost
        else:
            late = ask_blindly()
        with gateway(endpoint) as second:
            if unknown == "the next connection":
                client._connection.monitor.poll(1000 * TIMEOUT)
                late = ask_blindly()
            late.result()
            client.status()
    assert len(second.heard) == 2


def test_an_error_that_names_no_request_finds_its_request(endpoint: str) -> None:
    def refuse(request: Request) -> list[Reply]:
        if isinstance(request, GenerateRequest) and request.prompt == "bad":
            return [ErrorReply(code="invalid", message="too long")]
        return echo(request)

    with gateway(endpoint, refuse), Client(endpoint, timeout=TIMEOUT) as client:
        streams = [client.submit(prompt) for prompt in ("a", "bad", "b")]
        assert [streams[0].result().text, streams[2].result().text] == ["a", "b"]
        with pytest.raises(RequestError, match="too long"):
            streams[1].result()


def test_a_silent_gateway_is_given_up(endpoint: str) -> None:
    silent = gateway(endpoint, lambda _: [])
    with silent, Client(endpoint, timeout=0.2) as client, pytest.raises(NoAnswer):
        client.generate("x")


def test_no_gateway_is_given_up(endpoint: str) -> None:
    with Client(endpoint, timeout=0.1) as client, pytest.raises(NoAnswer):
        client.status()


def test_keys_where_the_gateway_has_none(endpoint: str, keys: Path) -> None:
    with gateway(endpoint) as one, Client(endpoint, keys=keys) as client:
        with pytest.raises(RequestError, match="refuses this client"):
            client.generate("x")
        with pytest.raises(RequestError, match="refuses this client"):
            client.status()
    assert not one.heard


def test_a_gateway_with_another_key_is_given_up(endpoint: str, keys: Path) -> None:
    """Another program that hangs up again and again is not a pipeline."""
    make_keys(other := keys.parent / "other", None)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        secure_server(server, other)
        server.bind(endpoint)
        with (
            Client(endpoint, timeout=0.2, keys=keys) as client,
            pytest.raises(NoAnswer),
        ):
            client.status()


def test_keys_that_are_not_there(endpoint: str, tmp_path: Path) -> None:
    with pytest.raises(ClientError, match=r"none/client.key_secret can't be read"):
        Client(endpoint, keys=tmp_path / "none")


def test_a_request_at_which_the_gateway_hangs_up_is_given_up(endpoint: str) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.setsockopt(zmq.MAXMSGSIZE, OVERSIZE_SLACK)
        server.bind(endpoint)
        with Client(endpoint) as client:
            with pytest.raises(RequestError, match=r"request has \d+ bytes, .* hung up 3 times"):
                client.generate("x" * OVERSIZE_SLACK)
            with ThreadPoolExecutor(1) as pool:
                answering = pool.submit(answer_one, server)
                assert client.generate("short").text == TEXT
                answering.result()


def answer_one(server: "zmq.Socket[bytes]") -> None:
    identity, number, frame = server.recv_multipart()
    request = MSGPACK.decode_request(frame)
    assert isinstance(request, GenerateRequest)
    server.send_multipart([identity, number, MSGPACK.encode(reply(request))])


def test_an_async_stream(endpoint: str) -> None:
    async def run() -> tuple[str, str]:
        async with AsyncClient(endpoint) as client:
            stream = client.stream("x")
            texts = [one.text async for one in stream]
            return "".join(texts), (await stream.result()).text

    with gateway(endpoint, EACH_CHARACTER):
        assert asyncio.run(run()) == (TEXT, TEXT)


def test_an_answer_that_came_while_sending_is_heard(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ's file descriptor is quiet about it then."""
    send = Connection._send

    def send_and_wait(self: Connection, answer: PendingRequest) -> None:
        send(self, answer)
        self.socket.poll(1000 * TIMEOUT)

    async def run() -> str:
        async with AsyncClient(endpoint) as client:
            await client.status()
            monkeypatch.setattr(Connection, "_send", send_and_wait)
            return (await asyncio.wait_for(client.generate("x"), TIMEOUT)).text

    with gateway(endpoint):
        assert asyncio.run(run()) == "x"


def test_a_cancelled_task_aborts_its_request(endpoint: str) -> None:
    async def run() -> str:
        async with AsyncClient(endpoint) as client:
            stream = client.stream("x")
            await anext(aiter(stream))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stream.result(), 0.05)
            return stream.request_id

    with gateway(endpoint, HALF) as one:
        request_id = asyncio.run(run())
        one.wait_for(2)
    assert one.heard[1:] == [AbortRequest(request_id=request_id)]


def test_an_answer_is_freed_as_soon_as_its_task_has_it(endpoint: str) -> None:
    """A circle of references would keep requests, of any size, until the collector runs."""

    async def run() -> PendingRequest | None:
        async with AsyncClient(endpoint) as client:
            answer = client.ask(GenerateRequest(prompt="x"))
            while not answer.final:
                await client.change(answer)
            kept = weakref.ref(answer)
            del answer
            return kept()

    gc.disable()
    try:
        with gateway(endpoint):
            assert asyncio.run(run()) is None
    finally:
        gc.enable()
