"""Clients with several addresses: the next one is tried where one is lost, dead or refuses them."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from msgspec.structs import replace

from penstock.launch.pipeline.target import free_port
from penstock.protocol.client import connection
from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.client.client import Client
from penstock.protocol.client.connection import Addresses
from penstock.protocol.client.session import ClientError, RequestError
from penstock.protocol.messages.client import GenerateRequest, TextDelta
from penstock.protocol.transport.context import Context, secure_server
from tests.launch.fake_gateway import TEXT, Gateway, gateway
from tests.launch.link import HOST, Link
from tests.protocol.client.conftest import HALF, TIMEOUT, WHOLE


@contextlib.contextmanager
def closed() -> Iterator[str]:
    """Yield an address at which connections are refused."""
    with socket.create_server((HOST, 0)) as server:
        port = server.getsockname()[1]
    yield f"tcp://localhost:{port}"


@contextlib.contextmanager
def black_hole() -> Iterator[str]:
    """Yield an address that does not answer, as of a machine that is off: a queue that is full."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server((HOST, 0), backlog=0))
        for _ in range(2):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield f"tcp://{HOST}:{server.getsockname()[1]}"


@contextlib.contextmanager
def mute() -> Iterator[str]:
    """Yield an address that accepts and says nothing, as of a process that hangs."""
    with socket.create_server((HOST, 0)) as server:
        yield f"tcp://{HOST}:{server.getsockname()[1]}"


@pytest.mark.parametrize("dead", [closed, black_hole, mute])
def test_a_dead_address_is_left_for_the_next(
    dead: Callable[[], contextlib.AbstractContextManager[str]],
    addresses: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT", 200)
    with (
        dead() as first,
        gateway(addresses[1]) as second,
        Client(f"{first},{addresses[0]},{addresses[1]}", timeout=TIMEOUT) as client,
    ):
        assert client.generate("x").text == "x"
        assert client.generate("y").text == "y"
    assert len(second.heard) == 2


def wait_for_failures(client: Client, number: int) -> None:
    """Return when `number` attempts to connect have failed."""
    while client._connection._addresses._num_failures < number:
        assert client._poller.poll(1000 * TIMEOUT)
        client._connection.take()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_addresses_are_tried_round_and_round(addresses: list[str], which: int) -> None:
    with Client(",".join(addresses), timeout=TIMEOUT) as client:
        stream = client.submit("x")
        wait_for_failures(client, 10)
        with gateway(addresses[which]) as one:
            assert stream.result().text == "x"
            client.status()
        assert len(one.heard) == 2


def test_a_round_has_a_pause(addresses: list[str]) -> None:
    one = Addresses(",".join(addresses))
    assert [one.turn() for _ in range(8)] == 2 * [True, True, True, False]
    assert one.current == addresses[0]
    one.turn()
    one.on_connected()
    assert [one.turn() for _ in range(4)] == [True, True, True, False]


def test_addresses_that_refuse_are_left_out_until_the_next_round(addresses: list[str]) -> None:
    one = Addresses(",".join(addresses))
    tried = []
    for _ in range(6):
        tried.append(addresses.index(one.current))
        if one.current == addresses[0]:
            one.on_refused()
        one.turn()
    assert tried == [0, 1, 2, 1, 2, 2]
    assert not one.is_refused
    assert one.current == addresses[0]
    for _ in addresses:
        one.on_refused()
        one.turn()
    assert one.is_refused
    one.on_connected()
    assert not one.is_refused


def go_on(deltas: Iterator[TextDelta], first: Gateway, second: Gateway) -> None:
    """Check that the second gateway sends what the first one has not sent."""
    assert "".join(one.text for one in deltas) == " two"
    [asked], [again] = first.heard, second.heard
    assert isinstance(asked, GenerateRequest)
    assert again == replace(asked, output_token_ids=[0, 1, 2])


@pytest.mark.parametrize("number", [1, 3])
def test_a_stream_goes_on_at_the_next_gateway(addresses: list[str], number: int) -> None:
    """The first one dies within the text. The next one has its address, or another one."""
    known = addresses[:number]
    with Client(",".join(known), timeout=TIMEOUT) as client:
        with gateway(known[0], HALF) as first:
            stream = client.stream("x")
            deltas = iter(stream)
            assert next(deltas).text == "one"
        with gateway(known[-1], WHOLE) as second:
            go_on(deltas, first, second)
            assert stream.result().text == TEXT


def test_a_stream_goes_on_with_asyncio(addresses: list[str]) -> None:
    async def run(first: Gateway) -> list[str]:
        async with AsyncClient(",".join(addresses)) as client:
            deltas = aiter(client.stream("x"))
            pieces = [(await anext(deltas)).text]
            first.close()
            return pieces + [one.text async for one in deltas]

    for _ in range(20):  # not every connection is so quick that a send may overlook it
        with gateway(addresses[1], WHOLE):
            said = asyncio.run(asyncio.wait_for(run(Gateway(addresses[0], HALF)), TIMEOUT))
        assert "".join(said) == "one two"


@pytest.mark.slow
def test_a_gateway_that_falls_silent_is_left(
    addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEARTBEAT_INTERVAL", 50)
    monkeypatch.setattr(connection, "HEARTBEAT_TIMEOUT", 2000)
    port = free_port()
    with (
        Link(port) as link,
        gateway(f"tcp://{HOST}:{port}", HALF) as first,
        gateway(addresses[1], WHOLE) as second,
        Client(f"{link.endpoint},{addresses[1]}", timeout=TIMEOUT) as client,
    ):
        deltas = iter(client.stream("x"))
        assert next(deltas).text == "one"
        link.cut()
        go_on(deltas, first, second)


@contextlib.contextmanager
def refusing(endpoint: str, keys: Path) -> Iterator[None]:
    """Yield a gateway that refuses who has no keys."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        secure_server(server, keys)
        server.bind(endpoint)
        yield


def test_where_one_refuses_the_others_are_asked(addresses: list[str], keys: Path) -> None:
    first, second, _ = addresses
    with (
        refusing(first, keys),
        gateway(second) as one,
        Client(f"{first},{second}", timeout=TIMEOUT) as client,
    ):
        assert client.generate("x").text == "x"
    assert len(one.heard) == 1


def test_a_question_fails_where_all_refuse(addresses: list[str], keys: Path) -> None:
    first, second, _ = addresses
    with (
        refusing(first, keys),
        refusing(second, keys),
        Client(f"{first},{second}", timeout=TIMEOUT) as client,
    ):
        for ask in (lambda: client.generate("x"), client.status):
            with pytest.raises(RequestError, match="refuses this client"):
                ask()


@pytest.mark.parametrize("which", [0, 1])
def test_where_one_refuses_and_one_is_dead_a_question_waits(
    addresses: list[str], keys: Path, which: int
) -> None:
    """For the dead one, or for the other one to let us in."""
    first, second, _ = addresses
    with contextlib.ExitStack() as stack:
        with refusing(first, keys):
            client = stack.enter_context(Client(f"{first},{second}", timeout=TIMEOUT))
            stream = client.submit("x")
            wait_for_failures(client, 4)
        with gateway(addresses[which]):
            assert stream.result().text == "x"


@pytest.mark.parametrize(
    ("endpoint", "wrong"),
    [
        ("tcp://a:1,", "''"),
        ("tcp://a:1,,tcp://b:1", "''"),
        ("tcp://a:1,b:1", "'b:1'"),
        ("tcp://a:1, tcp://b:1", "' tcp://b:1'"),
        ("tcp://a", "'tcp://a'"),
        ("tcp://a:65535,tcp://a:65536", "'tcp://a:65536'"),
        ("inproc://a", "'inproc://a'"),
        ("cluster://a", "'cluster://a'"),
    ],
)
def test_what_is_no_address_is_named(endpoint: str, wrong: str) -> None:
    with pytest.raises(ClientError) as caught:
        Client(endpoint)
    message = f"--endpoint: got {wrong}, expected tcp://HOST:PORT or ipc://PATH"
    meant = "; did you mean tcp://b:1?" if wrong == "'b:1'" else ""
    assert str(caught.value) == message + meant


class Names(Context):
    """A network that knows one name."""

    address: str
    waited: list[bool]

    def connect_socket(self, socket: "zmq.Socket[bytes]", endpoint: str, wait: bool = True) -> None:
        assert endpoint == "cluster://clients"
        self.waited.append(wait)
        super().connect_socket(socket, self.address)


def test_a_network_connects_to_a_name(addresses: list[str], keys: Path) -> None:
    async def run(context: Names) -> str:
        async with AsyncClient("cluster://clients", keys=keys, context=context) as client:
            return (await asyncio.wait_for(client.generate("x"), TIMEOUT)).text

    with Names() as context, gateway(addresses[0]):
        context.address, context.waited = addresses[0], []
        assert asyncio.run(run(context)) == "x"
        assert (context.waited, context.closed) == ([False], False)
