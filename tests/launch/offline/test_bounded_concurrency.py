"""Many questions of which few are open."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.launch.offline.llm import replies_to, submit_all
from penstock.protocol.client.client import Client
from penstock.protocol.client.session import NoAnswer, RequestError
from penstock.protocol.messages.client import (
    AbortRequest,
    ErrorReply,
    GenerateReply,
    GenerateRequest,
    Reply,
    Request,
)
from tests.launch.fake_gateway import Gateway, echo, reply

Make = Callable[..., tuple[Gateway, Client]]
TIMEOUT = 60.0


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Make]:
    """Yield a gateway that answers as the test says, and its client."""
    with contextlib.ExitStack() as stack:

        def make(
            behaviour: Callable[[Request], list[Reply]], timeout: float = TIMEOUT
        ) -> tuple[Gateway, Client]:
            endpoint = f"ipc://{tmp_path}/clients"
            gateway = stack.enter_context(contextlib.closing(Gateway(endpoint, behaviour)))
            return gateway, stack.enter_context(Client(endpoint, timeout=timeout))

        yield make


def requests(number: int) -> list[GenerateRequest]:
    return [GenerateRequest(prompt=f"p{one}", request_id=f"r{one}") for one in range(number)]


def texts(client: Client, number: int, size: int) -> dict[int, str]:
    found = {}
    for place, one in submit_all(client, requests(number), size):
        assert isinstance(one, GenerateReply)
        assert place not in found
        found[place] = one.text
    return found


def overloaded(retry_after: float | None) -> ErrorReply:
    return ErrorReply(code="overloaded", message="no", retry_after=retry_after)


def test_every_question_is_answered_at_its_place(pair: Make) -> None:
    _, client = pair(echo)
    assert texts(client, 50, 3) == {place: f"p{place}" for place in range(50)}
    assert texts(client, 0, 3) == {}


def test_replies_are_in_the_order_of_their_requests(pair: Make) -> None:
    def refuse_the_first(request: Request) -> list[Reply]:
        if len(gateway.heard) == 1:
            return [overloaded(0.01)]
        return echo(request)

    counted: list[None] = []
    gateway, client = pair(refuse_the_first)
    replies = replies_to(client, requests(5), 2, GenerateReply, lambda: counted.append(None))
    assert [one.text for one in replies] == [f"p{place}" for place in range(5)]
    assert len(counted) == 5


def test_what_is_refused_is_asked_again_behind_the_next_answer(pair: Make) -> None:
    refusals = {"r1": 2, "r2": 1, "r5": 3}

    def refuse(request: Request) -> list[Reply]:
        assert isinstance(request, GenerateRequest)
        name = str(request.request_id)
        if refusals.get(name, 0):
            refusals[name] -= 1
            return [overloaded(0.01)]
        return [reply(request, str(request.prompt))]

    gateway, client = pair(refuse)
    assert texts(client, 9, 3) == {place: f"p{place}" for place in range(9)}
    assert len(gateway.heard) == 9 + 6


def test_no_more_are_open_than_there_is_room_for_and_an_end_aborts_them(pair: Make) -> None:
    gateway, client = pair(lambda one: [] if isinstance(one, GenerateRequest) else echo(one), 0.5)
    with pytest.raises(NoAnswer):
        texts(client, 6, 3)
    client._timeout = TIMEOUT
    client.abort("last")  # when it is answered, the others are heard
    asked = [one.request_id for one in gateway.heard if isinstance(one, GenerateRequest)]
    aborted = [one.request_id for one in gateway.heard if isinstance(one, AbortRequest)]
    assert (asked, aborted) == (["r0", "r1", "r2"], ["r0", "r1", "r2", "last"])


def test_an_error_ends_it(pair: Make) -> None:
    def fail(request: Request) -> list[Reply]:
        bad = isinstance(request, GenerateRequest) and request.request_id == "r4"
        return [ErrorReply(code="invalid", message="bad")] if bad else echo(request)

    _, client = pair(fail)
    with pytest.raises(RequestError, match="bad"):
        texts(client, 9, 2)
    assert texts(client, 3, 2) == {place: f"p{place}" for place in range(3)}
