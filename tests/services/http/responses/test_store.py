"""Stored responses: their limit, and who may use them."""

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.services.http.responses.routes import _DECODER, ResponseStore, begun
from penstock.services.http.responses.schema import (
    Item,
    OutputMessage,
    OutputText,
    ResponseReply,
    ResponsesRequest,
)
from penstock.services.http.responses.to_chat_request import offer
from penstock.services.http.shared.access import Caller, caller
from penstock.services.http.shared.errors import ApiError


@pytest.fixture(autouse=True)
def as_client() -> Iterator[None]:
    token = caller.set(Caller(None, "", "", "a key"))
    yield
    caller.reset(token)


def put(store: ResponseStore, text: str = "so", num_items: int = 1) -> ResponseReply:
    """Keep a response to `hi`."""
    response = begun(ResponsesRequest(input="hi", temperature=0.0, top_p=1.0), offer([]), "m")
    for number in range(num_items):
        part = OutputText(text=text)
        message = OutputMessage(id=f"msg_{response.id}_{number}", content=[part])
        response.output.append(message)
    assert store.put(response, [Item(role="user", content="hi")])
    return response


def referenced(response: ResponseReply) -> list[Item]:
    return [Item(type="item_reference", id=item.id) for item in response.output]


def status(function: object, *arguments: object) -> int:
    with pytest.raises(ApiError) as caught:
        function(*arguments)  # type: ignore[operator]
    return caught.value.status


def test_a_conversation_is_continued() -> None:
    store = ResponseStore()
    response = put(store)
    question, answer = store.items(response.id)
    assert (question.role, question.content) == ("user", "hi")
    assert (answer.role, answer.content[0].text) == ("assistant", "so")  # type: ignore
    assert store.resolved([question, *referenced(response)]) == [question, answer]


def test_another_key_finds_nothing() -> None:
    store = ResponseStore()
    response = put(store)
    reference = referenced(response)
    store.resolved(reference)
    caller.set(Caller(None, "", "", "another key"))
    assert (status(store.body, response.id), status(store.items, response.id)) == (404, 400)
    assert status(store.resolved, reference) == 404


@pytest.mark.parametrize(
    "use",
    [
        lambda store, response: store.body(response.id),
        lambda store, response: store.resolved(referenced(response)),
    ],
    ids=["its body", "a reference"],
)
def test_the_least_recently_used_ones_are_evicted(use: Any) -> None:
    store = ResponseStore(max_bytes=40_000)
    first, second = put(store, "a" * 3000), put(store, "b" * 3000)
    for _ in range(6):
        use(store, first)
        put(store, "c" * 3000)
        assert store.num_bytes <= 40_000
    store.body(first.id)
    assert status(store.body, second.id) == 404
    assert status(store.resolved, referenced(second)) == 404


def test_a_response_beyond_the_limit_evicts_nothing() -> None:
    store = ResponseStore(max_bytes=10_000)
    first = put(store)
    before = store.num_bytes
    large = begun(ResponsesRequest(input="hi", temperature=0.0, top_p=1.0), offer([]), "m")
    assert not store.put(large, [Item(role="user", content="a" * 10_000)])
    assert store.body(first.id)
    assert status(store.body, large.id) == 404
    assert store.num_bytes == before


def test_references_decode_a_response_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResponseStore()
    first, second = put(store, num_items=50), put(store, num_items=50)
    decoded = []

    class Counting:
        def decode(self, data: bytes) -> list[Item]:
            decoded.append(data)
            return _DECODER.decode(data)

    monkeypatch.setattr("penstock.services.http.responses.routes._DECODER", Counting())
    mixed = [*referenced(first), *referenced(second)][::-1]
    found = store.resolved(mixed)
    assert [item.id for item in found] == [item.id for item in mixed]
    assert len(decoded) == 2


def test_an_item_is_referenced_once() -> None:
    store = ResponseStore()
    (reference,) = referenced(put(store))
    with pytest.raises(ApiError, match=r"input\[1\].id: got 'msg_.*' again") as caught:
        store.resolved([reference, reference])
    assert caught.value.status == 400
