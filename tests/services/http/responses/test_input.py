"""Input of stored responses, and its length."""

import pytest

from tests.services.http.responses.test_server import HI, PATH, Serve
from tests.services.http.test_apis import answering


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
