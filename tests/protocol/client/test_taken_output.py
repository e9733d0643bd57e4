"""Output that is taken as it arrives, without waking the task that waits for the stream."""

import asyncio
from collections.abc import Callable

import pytest

from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.messages.client import TextDelta
from tests.launch.fake_gateway import TEXT, gateway
from tests.protocol.client.conftest import EACH_CHARACTER


def returned(endpoint: str, take: Callable[[TextDelta], bool]) -> list[TextDelta]:
    """Return the pieces that `take` refused. Raises what it raises."""

    async def run() -> list[TextDelta]:
        async with AsyncClient(endpoint) as client:
            stream, found = client.stream("x"), []
            while one := await asyncio.wait_for(stream.next_delta(take), 30):
                found.append(one)
            assert (await stream.result()).text == TEXT
            return found

    with gateway(endpoint, EACH_CHARACTER):
        return asyncio.run(run())


def test_pieces_are_taken_in_order_and_once(endpoint: str) -> None:
    taken: list[TextDelta] = []

    def take(one: TextDelta) -> bool:
        taken.append(one)
        return True

    assert returned(endpoint, take) == []
    assert "".join(one.text for one in taken) == TEXT


def test_what_is_refused_is_returned_with_what_comes_after_it(endpoint: str) -> None:
    heard = ""

    def take(one: TextDelta) -> bool:
        nonlocal heard
        if one.text.startswith(" "):
            return False
        heard += one.text
        return True

    (refused,) = returned(endpoint, take)
    assert refused.text.startswith(" ")
    assert "".join(sorted(heard + refused.text)) == "".join(sorted(TEXT))


def test_an_exception_reaches_the_task_that_waits(endpoint: str) -> None:
    def take(_: TextDelta) -> bool:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        returned(endpoint, take)
