"""Compactions: what they keep, how they are continued, and what is refused."""

from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from penstock.protocol.messages.client import GenerateRequest, Reply, Request
from penstock.services.http.responses.to_chat_request import SUMMARY
from tests.launch.fake_gateway import TEXT, reply
from tests.services.http.conftest import NUM_AT_START, Served, behave
from tests.services.http.responses.test_server import PATH, STORED, answering

Serve = Callable[..., Served]
COMPACT = f"{PATH}/compact"
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one"},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "two"},
    {"role": "assistant", "content": [{"type": "output_text", "text": "three"}]},
    {"role": "user", "content": [{"type": "input_text", "text": "four"}]},
]


def post(client: httpx.Client, **fields: Any) -> httpx.Response:
    return client.post(COMPACT, json={"model": "qwen3-demo"} | fields)


def messages_of(served: Served) -> list[tuple[str, str | None]]:
    """Return roles and texts of the newest request's messages."""
    sent = [one for one in served.asked.heard if isinstance(one, GenerateRequest)]
    return [(one.role, one.content) for one in sent[-1].messages or ()]  # type: ignore[misc]


def test_a_compaction_is_continued(serve: Serve) -> None:
    served = serve(answering)
    with served.client() as client:
        compacted = post(client, input=CONVERSATION, instructions="x").json()
        (first, *_, last) = messages_of(served)
        assert first == ("system", "x")
        assert "Summarize this conversation" in str(last)
        assert len(messages_of(served)) == 1 + 6 + 1
        *kept, compaction = compacted["output"]
        texts = [(one["role"], one["content"][0]["text"]) for one in kept]
        assert texts == [("system", "Be brief."), ("user", "one"), ("user", "four")]
        assert {one["content"][0]["type"] for one in kept} == {"input_text"}
        assert compaction["type"] == "compaction"
        assert compaction["encrypted_content"] == SUMMARY + TEXT
        assert (compacted["object"], compacted["usage"]["output_tokens"]) == (
            "response.compaction",
            len(TEXT),
        )
        after = [*compacted["output"], {"role": "user", "content": "five"}]
        assert client.post(PATH, json={"input": after}).status_code == 200
        summary = ("assistant", f"Summary of the conversation so far:\n\n{TEXT}")
        assert messages_of(served) == [*texts, summary, ("user", "five")]
        again = post(client, input=after).json()["output"]
        assert [one["type"] for one in again] == ["message"] * 4 + ["compaction"]


def test_a_stored_response_is_compacted(serve: Serve) -> None:
    served = serve(answering)
    with served.client() as client:
        first = client.post(PATH, json=STORED).json()["id"]
        output = post(client, previous_response_id=first).json()["output"]
        assert [one.get("role") for one in output] == ["user", None]
        assert [role for role, _ in messages_of(served)] == ["user", "assistant", "user"]
        asked = post(client, previous_response_id=first, input="and?").json()["output"]
        assert [one.get("role") for one in asked] == ["user", "user", None]
        lost = post(client, previous_response_id="resp_x").json()["error"]
        assert lost["code"] == "previous_response_not_found"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": "x", "model": None}, "model"),
        ({"input": [{"type": "message"}]}, "input[0].role"),
        ({"input": [{"type": "compaction"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "compaction", "encrypted_content": "gAAA"}]}, None),
        ({"input": "x", "stream": True}, "stream"),
    ],
)
def test_refusals(serve: Serve, fields: dict[str, Any], param: str | None) -> None:
    served = serve(answering)
    with served.client() as client:
        refused = post(client, **fields)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == (param or "input[0].encrypted_content")
    assert "expected" in error["message"]
    assert len(served.asked.heard) == NUM_AT_START


def ending(text: str, num_tokens: int) -> Callable[[Request], list[Reply]]:
    """Return the behaviour of a gateway whose answers are cut after some tokens."""

    def behaviour(request: Request) -> list[Reply]:
        if not isinstance(request, GenerateRequest):
            return behave(request)
        cut = reply(request, text)
        cut.finish_reason = "length"
        cut.usage.output_tokens = num_tokens
        return [cut]

    return behaviour


@pytest.mark.parametrize(("num_tokens", "status"), [(7, 400), (1024, 200)])
def test_a_summary_that_is_cut(serve: Serve, num_tokens: int, status: int) -> None:
    """The end of the context is an error, the limit of a summary is not."""
    with serve(ending(TEXT, num_tokens)).client() as client:
        answer = post(client, input="x")
    assert answer.status_code == status
    if status == 400:
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "input")


def test_an_empty_summary_is_an_error(serve: Serve) -> None:
    """The conversation would be lost."""
    with serve(ending(" \n", 1024)).client() as client:
        assert post(client, input="x").status_code == 500


@pytest.mark.filterwarnings("ignore:Pydantic serializer")  # its types lack messages of users
def test_openais_client(serve: Serve) -> None:
    served = serve(answering)
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        compacted = client.responses.compact(model="qwen3-demo", input="hi", prompt_cache_key="a")
        given: Any = compacted.output
        after = client.responses.create(model="qwen3-demo", input=given)
    assert compacted.output[-1].type == "compaction"
    assert after.output_text == TEXT
