"""Tools of a response: namespaces of functions, and tools that the server does not run."""

import json
import logging
from typing import Any

import pytest

from penstock.protocol.messages.client import GenerateRequest, Reply, Request
from penstock.services.http.shared import body
from tests.launch.fake_gateway import reply
from tests.services.http.conftest import Serve, Served, behave
from tests.services.http.responses.assembled import assembled
from tests.services.http.responses.test_server import PATH, answering, events_in

FUNCTION: dict[str, Any] = {"type": "function", "name": "status", "parameters": {"type": "object"}}
SPACE = {"type": "namespace", "name": "mcp__a", "description": "A server.", "tools": [FUNCTION]}
SEARCH = {"type": "web_search", "external_web_access": True}
CALL = '<tool_call>\n{{"name": "{}", "arguments": {{}}}}\n</tool_call>'


def calling(name: str) -> Any:
    """Return a gateway's behaviour that calls a function."""

    def call(request: Request) -> list[Reply]:
        if not isinstance(request, GenerateRequest):
            return behave(request)
        answer = reply(request)
        answer.text = CALL.format(name)
        return [answer]

    return call


def generations(served: Served) -> list[GenerateRequest]:
    """Return the requests that the server has sent to the gateway."""
    return [sent for sent in served.asked.heard if isinstance(sent, GenerateRequest)]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("called", "expected"),
    [("mcp__a.status", ("mcp__a", "status")), ("status", (None, "status"))],
)
def test_a_call_has_the_namespace_of_its_function(
    serve: Serve, called: str, expected: tuple[str | None, str], is_stream: bool
) -> None:
    """Two functions have the same name; the client's next request repeats the call."""
    served = serve(calling(called))
    asked = {"input": "hi", "tools": [FUNCTION, SPACE], "stream": is_stream}
    with served.client() as client:
        answer = client.post(PATH, json=asked)
        response = assembled(events_in(answer.text)) if is_stream else answer.json()
        (call,) = response["output"]
        assert (call.get("namespace"), call["name"]) == expected
        assert response["tools"][1]["name"] == "mcp__a"
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "x"}
        history = [{"role": "user", "content": "hi"}, call, output]
        client.post(PATH, json={"input": history, "tools": [FUNCTION, SPACE]})
        later = {"previous_response_id": response["id"], "input": [output]}
        client.post(PATH, json=later | {"tools": [FUNCTION, SPACE]})
    first, *others = generations(served)
    assert [tool["function"]["name"] for tool in first.tools or ()] == ["status", "mcp__a.status"]
    assert len(others) == 2
    for request in others:
        message: Any = (request.messages or [])[1]
        assert [call["function"]["name"] for call in message.tool_calls] == [called]


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "status", "namespace": "mcp__a"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [
                {"type": "web_search_preview"},
                {"type": "function", "name": "status", "namespace": "mcp__a"},
            ],
        },
    ],
)
def test_a_function_of_a_namespace_is_forced(serve: Serve, choice: dict[str, Any]) -> None:
    served = serve(calling("mcp__a.status"))
    with served.client() as client:
        asked = {"input": "hi", "tools": [FUNCTION, SPACE], "tool_choice": choice}
        response = client.post(PATH, json=asked).json()
    assert response["tool_choice"] == choice
    (request,) = generations(served)
    assert request.structured_outputs
    assert "mcp__a.status" in (request.structured_outputs.grammar or "")


def test_tools_that_are_left_out_are_named(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "_logged", {})
    tools = [SEARCH, {"type": "web_search_preview_2025_03_11"}, {"type": "local_shell"}]
    served = serve(answering)
    with served.client() as client, caplog.at_level(logging.WARNING, "http"):
        asked = {"input": "hi", "tools": [*tools, FUNCTION]}
        whole = client.post(PATH, json=asked)
        streamed = client.post(PATH, json=asked | {"stream": True})
        others = client.post(PATH, json={"input": "hi", "tools": [FUNCTION]})
        message = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
        bash = [{"type": "bash_20250124", "name": "bash"}]
        messages = client.post("/v1/messages", json=message | {"tools": bash})
    for response in (whole, streamed):
        assert response.headers["x-ignored-tools"] == "local_shell, web_search"
    assert "x-ignored-tools" not in others.headers
    assert messages.headers["x-ignored-tools"] == "bash"
    assert [tool["name"] for tool in whole.json()["tools"]] == ["status"]
    said = [record.args for record in caplog.records if "left out" in record.getMessage()]
    assert said == [("local_shell",), ("web_search",), ("bash",)]
    request = generations(served)[0]
    assert [tool["function"]["name"] for tool in request.tools or ()] == ["status"]


def test_an_answer_without_the_tools_that_were_left_out(serve: Serve) -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    for choice in ("auto", "none", allowed):
        with serve(answering).client() as client:
            asked = {"input": "hi", "tools": [SEARCH], "tool_choice": choice}
            response = client.post(PATH, content=json.dumps(asked))
        assert response.status_code == 200, response.text
