"""The `n` answers to a prompt: their requests, and clients with a gateway of the test's replies."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.client.client import Client
from penstock.protocol.client.session import RequestError, answer_requests
from penstock.protocol.messages.client import (
    AbortReply,
    AbortRequest,
    ErrorReply,
    GenerateRequest,
    Reply,
    Request,
)
from penstock.protocol.messages.sampling import MAX_N
from tests.launch.fake_gateway import gateway, reply


@given(
    n=st.integers(1, MAX_N),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    name=st.none() | st.text(min_size=1, max_size=9),
)
def test_requests_differ_in_what_belongs_to_one_answer(
    n: int, seed: int | None, name: str | None
) -> None:
    request = GenerateRequest(
        prompt="p", n=n, seed=seed, request_id=name, prompt_logprobs=1, temperature=0.5
    )
    requests = answer_requests(request)
    assert len(requests) == len({one.request_id for one in requests}) == n
    if name is not None:
        assert [one.request_id for one in requests] == [f"{name}-{index}" for index in range(n)]
    assert [one.prompt_logprobs for one in requests] == [1] + [None] * (n - 1)
    assert [one.num_answers for one in requests] == [n] + [0] * (n - 1)
    for index, one in enumerate(requests):
        assert one.n == 1
        if seed is None:
            assert one.seed is None
        else:
            assert one.seed is not None
            assert -(2**63) <= one.seed < 2**63
            assert (one.seed - seed - index) % 2**64 == 0
        own = {"n": n, "seed": seed, "request_id": name, "prompt_logprobs": 1, "num_answers": 1}
        assert replace(one, **own) == request
    assert request.n == n  # it may be sent again


@pytest.mark.parametrize(
    ("fields", "field", "expected"),
    [
        *(({"n": number}, "n", "`int` >= 1") for number in (0, -4)),
        *(({"n": number}, "n", "`int` <= 128") for number in (MAX_N + 1, 10**30)),
        *(({"n": number}, "n", "`int`") for number in (1.5, "4", True, None)),
        ({"n": 2, "seed": "x"}, "seed", "`int | null`"),
    ],
)
def test_invalid_values(endpoint: str, fields: dict[str, Any], field: str, expected: str) -> None:
    with Client(endpoint, timeout=60) as client, pytest.raises(RequestError) as caught:
        client.generate_n("p", **fields)
    assert (caught.value.code, caught.value.field) == ("invalid", field)
    assert str(caught.value) == f"{field}: got {fields[field]!r}, expected {expected}"


def test_answers_are_in_order(endpoint: str) -> None:
    def echo_seed(request: Request) -> list[Reply]:
        assert isinstance(request, GenerateRequest)
        return [reply(request, f"seed {request.seed}")]

    async def texts() -> list[str]:
        async with AsyncClient(endpoint) as client:
            return [one.text for one in await client.generate_n("p", n=4, seed=3)]

    with gateway(endpoint, echo_seed), Client(endpoint, timeout=60) as client:
        expected = [f"seed {3 + index}" for index in range(4)]
        assert [one.text for one in client.generate_n("p", n=4, seed=3)] == expected
        assert asyncio.run(texts()) == expected


@pytest.mark.parametrize("is_async", [False, True])
def test_a_failure_aborts_the_other_answers(endpoint: str, is_async: bool) -> None:
    def fail_second(request: Request) -> list[Reply]:
        request_id = getattr(request, "request_id", None)
        if isinstance(request, GenerateRequest) and request_id == "r-1":
            return [ErrorReply(code="failed", message="no memory", request_id=request_id)]
        return [reply(request)] if request_id == "r-0" else []  # type: ignore[arg-type]

    async def generate() -> None:
        async with AsyncClient(endpoint) as client:
            await client.generate_n("p", n=4, request_id="r")

    with gateway(endpoint, fail_second) as one:
        with pytest.raises(RequestError, match="no memory"):
            if is_async:
                asyncio.run(generate())
            else:
                with Client(endpoint, timeout=60) as client:
                    client.generate_n("p", n=4, request_id="r")
        one.wait_for(6 if is_async else 8)  # a `Client` aborts answers that have come, too
        aborted = {other.request_id for other in one.heard if isinstance(other, AbortRequest)}
    assert {"r-2", "r-3"} <= aborted


def test_a_cancelled_task_aborts_all_answers(endpoint: str) -> None:
    with gateway(endpoint, lambda _: []) as one:

        async def cancel() -> None:
            async with AsyncClient(endpoint) as client:
                task = asyncio.ensure_future(client.generate_n("p", n=3, request_id="r"))
                await asyncio.to_thread(one.wait_for, 3)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

        asyncio.run(cancel())
        one.wait_for(6)
        aborted = [other.request_id for other in one.heard if isinstance(other, AbortRequest)]
    assert sorted(aborted) == ["r-0", "r-1", "r-2"]


def test_unanswered_ones_go_to_the_next_gateway(endpoint: str) -> None:
    def first_only(request: Request) -> list[Reply]:
        assert isinstance(request, GenerateRequest)
        return [reply(request, "old")] if request.request_id == "r-0" else []

    with Client(endpoint, timeout=60) as client:
        with gateway(endpoint, first_only) as old:
            streams = client.submit_n("p", n=3, seed=1, request_id="r")
            assert streams[0].result().text == "old"
            old.wait_for(3)
        with gateway(endpoint) as new:
            assert [one.result().text for one in streams] == ["old", "p", "p"]
    assert new.heard == old.heard[1:]


@pytest.mark.parametrize("is_async", [False, True])
def test_an_abort_by_the_given_id_aborts_all_answers(endpoint: str, is_async: bool) -> None:
    """No other request is aborted, whatever its id."""
    fields: dict[str, Any] = {"n": 3, "request_id": "r"}

    def end_aborted(request: Request) -> list[Reply]:
        if isinstance(request, AbortRequest):
            return [AbortReply(request_id=request.request_id, found=request.request_id != "r-1")]
        return []

    async def abort() -> list[bool]:
        async with AsyncClient(endpoint) as client:
            client.submit("p", request_id="r-3")
            client.submit_n("p", **fields)
            return [await client.abort("r"), await client.abort("r-1")]

    with gateway(endpoint, end_aborted) as one:
        if is_async:
            found = asyncio.run(abort())
        else:
            with Client(endpoint, timeout=60) as client:
                client.submit("p", request_id="r-3")
                client.submit_n("p", **fields)
                found = [client.abort("r"), client.abort("r-1")]
        aborted = [other.request_id for other in one.heard if isinstance(other, AbortRequest)]
    assert found == [True, False]
    assert sorted(aborted) == ["r-0", "r-1", "r-1", "r-2"]
