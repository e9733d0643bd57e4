"""Responses over real connections: whole, streamed, ended in the middle, and stored."""

import json
from typing import Any

import httpx
import pytest

from penstock.protocol.messages.client import GenerateRequest
from tests.services.http.conftest import Serve
from tests.services.http.responses.assembled import assembled
from tests.services.http.test_apis import answering, failing

pytestmark = pytest.mark.slow

PATH = "/v1/responses"
HI = {"input": "hi"}


def events_in(body: str) -> list[dict[str, Any]]:
    """Return the bodies of events, which have names."""
    *events, end, nothing = body.split("\n\n")
    assert (end, nothing) == ("data: [DONE]", "")
    names, found = zip(*(one.split("\n") for one in events), strict=True)
    bodies = [json.loads(one.removeprefix("data: ")) for one in found]
    assert list(names) == [f"event: {one['type']}" for one in bodies]
    return bodies


def test_an_error_in_a_stream_is_its_last_event(serve: Serve) -> None:
    with serve(failing).client() as client:
        body = client.post(PATH, json=HI | {"stream": True}).text
        failed = assembled(events_in(body))
        assert failed["error"]["message"] == "max_output_tokens: got 9, expected less"
        assert client.get(f"{PATH}/{failed['id']}").json() == failed


def test_stored_responses(serve: Serve) -> None:
    served = serve(answering)
    with served.client() as client:
        first = client.post(PATH, json=HI).json()
        streamed = assembled(events_in(client.post(PATH, json=HI | {"stream": True}).text))
        for one in (first, streamed):
            assert client.get(f"{PATH}/{one['id']}").json() == one
        events = client.get(f"{PATH}/{first['id']}?stream=true&starting_after=1")
        assert (events.status_code, events.json()["error"]["param"]) == (400, "stream")
        asked = {"input": "and?", "previous_response_id": first["id"], "instructions": "x"}
        asked["store"] = False  # which is about this response alone
        second = client.post(PATH, json=asked).json()
        assert second["previous_response_id"] == first["id"]
        sent = [one for one in served.asked.heard if isinstance(one, GenerateRequest)]
        roles = [one.role for one in sent[-1].messages or ()]
        assert roles == ["system", "user", "assistant", "user"]
        assert not second["store"]
        assert client.get(f"{PATH}/{second['id']}").status_code == 404
        deleted = client.delete(f"{PATH}/{first['id']}").json()
        assert deleted == {"id": first["id"], "object": "response", "deleted": True}
        again = client.post(PATH, json=asked)
        assert again.status_code == 400
        error = again.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", "previous_response_id")
        assert error["code"] == "previous_response_not_found"


@pytest.mark.parametrize(("fields", "status"), [({}, 200), ({"store": False}, 404)])
def test_items_are_kept_for_references(serve: Serve, fields: dict[str, Any], status: int) -> None:
    with serve(answering).client() as client:
        (item,) = client.post(PATH, json=HI | fields).json()["output"]
        reference = {"type": "item_reference", "id": item["id"]}
        response = client.post(PATH, json={"input": [reference, {"role": "user", "content": "x"}]})
    assert response.status_code == status


@pytest.mark.parametrize(
    ("path", "given", "status", "param"),
    [
        ("", {"background": True}, 400, "background"),
        ("", {"previous_response_id": "resp_x"}, 400, "previous_response_id"),
        ("", {"input": [{"type": "item_reference", "id": "msg_x"}]}, 404, "input[0].id"),
        ("/input_tokens", {"input": None}, 400, "input"),
        ("/compact", {}, 405, None),
        ("/resp_x/cancel", {}, 404, None),
    ],
)
def test_refusals(
    serve: Serve, path: str, given: dict[str, Any], status: int, param: str | None
) -> None:
    with serve(answering).client() as client:
        response: httpx.Response = client.post(PATH + path, json={"input": "x"} | given)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param)
    assert param or error["message"].startswith(f"got POST {PATH}{path}, ")


def test_input_items_are_listed(serve: Serve) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc_1"}
    asked = [
        {"role": "user", "content": "one"},
        call,
        {"type": "function_call_output", "call_id": "c", "output": "two"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "three"}]},
    ]
    with serve(answering).client() as client:
        first = client.post(PATH, json={"input": asked}).json()
        path = f"{PATH}/{first['id']}/input_items"
        page = client.get(path, params={"order": "asc", "include[]": "x"}).json()
        items = page["data"]
        assert (page["object"], page["has_more"]) == ("list", False)
        assert (page["first_id"], page["last_id"]) == (items[0]["id"], items[-1]["id"])
        assert len({one["id"] for one in items}) == 4
        assert items[1] == call | {"status": "completed"}
        message = {key: items[0][key] for key in ("type", "role", "content")}
        content = [{"type": "input_text", "text": "one"}]
        assert message == {"type": "message", "role": "user", "content": content}
        assert items[3]["content"][0]["annotations"] == []
        listed, after = [], {}
        while not listed or page["has_more"]:
            page = client.get(path, params={"limit": 3} | after).json()
            listed += page["data"]
            after = {"after": page["last_id"]}
        assert listed == items[::-1]
        assert client.get(path, params=after).json()["data"] == []
        # of a later response: with those before it, and their answers
        fields = {"input": "and?", "previous_response_id": first["id"]}
        second = client.post(PATH, json=fields).json()
        found = client.get(f"{PATH}/{second['id']}/input_items").json()["data"]
        assert len(found) == 6
        assert found[1]["id"] == first["output"][0]["id"]


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "x"}, "after"),
    ],
)
def test_invalid_parameters_of_a_list(serve: Serve, params: dict[str, str], param: str) -> None:
    with serve(answering).client() as client:
        first = client.post(PATH, json=HI).json()
        refused = client.get(f"{PATH}/{first['id']}/input_items", params=params)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert client.get(f"{PATH}/resp_x/input_items").status_code == 404
        # the path decides
        other = {"response_id": first["id"]}
        assert client.get(f"{PATH}/resp_x", params=other).status_code == 404
