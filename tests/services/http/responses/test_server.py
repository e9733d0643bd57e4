"""Responses over real connections: whole, streamed, ended in the middle, and stored."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from penstock.protocol.messages.client import (
    GenerateRequest,
)
from tests.launch.fake_gateway import TEXT
from tests.services.http.conftest import Served
from tests.services.http.responses.assembled import assembled
from tests.services.http.test_apis import answering, failing

pytestmark = pytest.mark.slow

Serve = Callable[..., Served]
PATH = "/v1/responses"
HI = {"input": "hi"}


def events_in(body: str) -> list[dict[str, Any]]:
    *events, end, nothing = body.split("\n\n")
    assert (end, nothing) == ("data: [DONE]", "")
    found = []
    for one in events:
        name, data = one.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def text_of(response: dict[str, Any]) -> str:
    return str(response["output"][0]["content"][0]["text"])


def test_whole_and_streamed(serve: Serve) -> None:
    with serve(answering).client() as client:
        whole = client.post(PATH, json=HI).json()
        assert (whole["status"], text_of(whole)) == ("completed", TEXT)
        body = client.post(PATH, json=HI | {"stream": True}).text
        assert text_of(assembled(events_in(body))) == TEXT


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
        assert client.get(f"{PATH}/{first['id']}").json() == first
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
    ("given", "path"),
    [
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "msg_x"}]}, "input[0].id"),
    ],
)
def test_refusals(serve: Serve, given: dict[str, Any], path: str) -> None:
    with serve(answering).client() as client:
        response: httpx.Response = client.post(PATH, json={"input": "x"} | given)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == path


@pytest.mark.parametrize("end", ["compact", "resp_x/cancel"])
def test_actions_that_are_not_supported(serve: Serve, end: str) -> None:
    with serve(answering).client() as client:
        response = client.post(f"{PATH}/{end}", json={"model": "qwen3-demo", "input": "x"})
    assert response.status_code in (404, 405)
    assert response.json()["error"]["message"].startswith(f"got POST {PATH}/{end}, ")


def test_events_of_a_stored_response_are_not_kept(serve: Serve) -> None:
    with serve(answering).client() as client:
        name = client.post(PATH, json=HI).json()["id"]
        response = client.get(f"{PATH}/{name}?stream=true&starting_after=1")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stream")


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


def test_input_tokens_need_an_input(serve: Serve) -> None:
    with serve(answering).client() as client:
        counted = client.post(f"{PATH}/input_tokens", json={"input": "hi"}).json()
        assert counted == {"object": "response.input_tokens", "input_tokens": 1}
        refused = client.post(f"{PATH}/input_tokens", json={})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
