"""Fields that no body has: ignored and named, or refused."""

import logging
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from penstock.services.http.generation.schema import ChatRequest, CompletionRequest
from penstock.services.http.messages import MessagesRequest
from penstock.services.http.pooling import EmbeddingRequest, RerankRequest
from penstock.services.http.responses.schema import ResponsesRequest
from penstock.services.http.shared import body
from penstock.services.http.shared.access import Caller, caller
from penstock.services.http.shared.body import MAX_LOGGED, MAX_UNKNOWN, decode_body
from penstock.services.http.shared.errors import ApiError
from tests.services.http.conftest import Serve

USER = {"role": "user", "content": "hi"}
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"maxTokens": {}}}}
TOOL = {"type": "function", "function": FUNCTION}
FONT = {"type": "text", "text": "a", "font": 1}
OWN_SCHEMA = {"name": "a", "strict": True, "schema": {"temprature": 1}}
CONTENTS: dict[type, dict[str, Any]] = {
    ChatRequest: {"messages": [USER]},
    CompletionRequest: {"prompt": "hi"},
    MessagesRequest: {"messages": [USER], "max_tokens": 5},
    ResponsesRequest: {"input": "hi"},
    EmbeddingRequest: {"input": "hi"},
    RerankRequest: {"query": "hi", "documents": ["a"]},
}


@pytest.fixture(autouse=True)
def headers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[bytes, bytes]]:
    """Return the headers of the response; nothing was logged before."""
    monkeypatch.setattr(body, "_logged", {})
    found: dict[bytes, bytes] = {}
    token = caller.set(Caller(None, "", "", headers=found))
    yield found
    caller.reset(token)


def decode(kind: Any, **given: Any) -> Any:
    return decode_body(msgspec.json.encode(CONTENTS[kind] | given), kind)


def ignored(headers: dict[bytes, bytes]) -> str:
    return headers.pop(b"x-ignored-fields", b"").decode()


@pytest.mark.parametrize("kind", CONTENTS)
def test_an_unknown_field_changes_nothing_and_is_named(
    kind: Any, headers: dict[bytes, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    assert decode(kind, colour="red", shade={"a": [1]}) == decode(kind)
    assert ignored(headers) == "colour, shade"
    assert decode(kind, colour="blue", tone=None) == decode(kind)
    assert ignored(headers) == "colour"
    assert [one.args for one in caplog.records] == [("colour",), ("shade",)]
    assert all(one.levelno == logging.WARNING for one in caplog.records)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"messages": [USER | {"mood": 1}, USER | {"mood": 2}]}, "messages[].mood"),
        ({"messages": [{"role": "user", "content": [FONT]}]}, "messages[].content[].font"),
        ({"tools": [TOOL | {"owner": "me"}]}, "tools[].owner"),
        ({"tools": [{"type": "function", "function": FUNCTION | {"since": 1}}]}, "tools[]."),
        ({"stream": True, "stream_options": {"pace": 1}}, "stream_options.pace"),
        ({"response_format": {"type": "text", "locale": "de"}}, "response_format.locale"),
        ({"structured_outputs": {"regex": "a", "yaml": 1}}, "structured_outputs.yaml"),
        ({"chat_template_kwargs": {"maxTokens": 1}}, ""),
        ({"structured_outputs": {"json": {"type": "object", "maxTokens": 1}}}, ""),
        ({"response_format": {"type": "json_schema", "json_schema": OWN_SCHEMA}}, ""),
    ],
)
def test_objects_in_the_body(
    given: dict[str, Any], named: str, headers: dict[bytes, bytes]
) -> None:
    decode(ChatRequest, **given)
    found = ignored(headers)
    assert found.startswith(named) if named else not found


def test_what_a_server_sent_may_be_sent_back(headers: dict[bytes, bytes]) -> None:
    call = {"id": "a", "type": "function", "index": 0, "function": {"name": "f", "arguments": ""}}
    answer = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]}
    answer |= {"annotations": [], "audio": None, "function_call": None, "reasoning": "so"}
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    request = decode(ChatRequest, messages=[USER, answer, {"role": "user", "content": [part]}])
    assert request.messages[1].tool_calls[0].function.name == "f"
    assert not ignored(headers)


def test_arguments_of_calls_are_the_users(headers: dict[bytes, bytes]) -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": {"maxTokens": 1, "colour": 2}}}
    answer = {"role": "assistant", "tool_calls": [call]}
    request = decode(ChatRequest, messages=[USER, answer])
    arguments = request.messages[1].tool_calls[0].function.arguments
    assert arguments == {"maxTokens": 1, "colour": 2}
    used = {"type": "tool_use", "id": "a", "name": "f", "input": {"colour": 2, "text": "b"}}
    turns = [USER, {"role": "assistant", "content": [used | {"origin": "x"}]}]
    assert decode(MessagesRequest, messages=turns).messages[1].content[0].input == used["input"]
    assert ignored(headers) == "messages[].content[].origin"


@pytest.mark.parametrize(
    ("kind", "name", "meant"),
    [
        (ChatRequest, "max_token", "max_tokens"),
        (ChatRequest, "maxTokens", "max_tokens"),
        (ChatRequest, "max-tokens", "max_tokens"),
        (ChatRequest, "temprature", "temperature"),
        (ChatRequest, "tempreture", "temperature"),
        (ChatRequest, "temprture", "temperature"),
        (ChatRequest, "topP", "top_p"),
        (ChatRequest, "stpo", "stop"),
        (ChatRequest, "presence_penality", "presence_penalty"),
        (ChatRequest, "message", "messages"),
        (CompletionRequest, "promt", "prompt"),
        (MessagesRequest, "stop_sequence", "stop_sequences"),
        (ResponsesRequest, "max_output_token", "max_output_tokens"),
        (EmbeddingRequest, "dimension", "dimensions"),
        (RerankRequest, "topN", "top_n"),
    ],
)
def test_a_mistyped_field_is_refused(kind: Any, name: str, meant: str) -> None:
    with pytest.raises(ApiError) as caught:
        decode(kind, **{name: 1})
    assert str(caught.value) == f"{name}: got an unknown field; did you mean `{meant}`?"
    assert (caught.value.status, caught.value.body.error.param) == (400, name)


@pytest.mark.parametrize(
    ("given", "path", "meant"),
    [
        (
            {"stream_options": {"includeUsage": True}},
            "stream_options.includeUsage",
            "include_usage",
        ),
        (
            {"tools": [TOOL, {"type": "function", "function": {"name": "f", "parameter": {}}}]},
            "tools[1].function.parameter",
            "parameters",
        ),
        ({"structured_outputs": {"regx": "a"}}, "structured_outputs.regx", "regex"),
    ],
)
def test_a_mistyped_field_of_an_object(given: dict[str, Any], path: str, meant: str) -> None:
    with pytest.raises(ApiError, match=f"did you mean `{meant}`") as caught:
        decode(ChatRequest, **given)
    assert caught.value.body.error.param == path


# names of other servers' fields
FOREIGN = """chat_format conversation_id extra_body generation_config logit_scale
max_retries max_tools max_turns min_keep model_id model_name n_keep num_ctx prompt_template
reasoning_format response_mime_type safety_settings session stream_mode stream_usage timeout
tool_config tool_prompt trace_id user_id"""


@pytest.mark.parametrize("name", FOREIGN.split())
def test_a_field_of_another_server_is_no_mistyped_one(
    name: str, headers: dict[bytes, bytes]
) -> None:
    for kind in (ChatRequest, CompletionRequest, MessagesRequest, ResponsesRequest):
        decode(kind, **{name: 1})
        assert ignored(headers) == name


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"messages": [USER, {"role": "assistant", "function_call": {"name": "f"}}]}, None),
        ({"messages": [USER, {"role": "assistant", "content": "So", "prefix": True}]}, None),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"enable_thinking": False}, "enable_thinking"),
        ({"mirostat": 2}, "mirostat"),
        ({"use_beam_search": True}, "use_beam_search"),
    ],
)
def test_what_would_change_the_answer_is_refused(given: dict[str, Any], path: str | None) -> None:
    with pytest.raises(ApiError, match="it is not supported; leave it out") as caught:
        decode(ChatRequest, **given)
    name = caught.value.body.error.param
    assert name == path if path else str(name).startswith("messages[1].")


def test_a_flood_of_fields_is_refused() -> None:
    decode(ChatRequest, **{f"f{number}": 1 for number in range(MAX_UNKNOWN)})
    for number in (MAX_UNKNOWN + 1, 100_000):
        with pytest.raises(ApiError, match="the body: got more than 100 unknown fields"):
            decode(ChatRequest, **{f"f{name}": 1 for name in range(number)})


def test_the_log_has_an_end(caplog: pytest.LogCaptureFixture) -> None:
    for number in range(0, 3 * MAX_LOGGED, 50):
        decode(ChatRequest, **{f"f{name}": 1 for name in range(number, number + 50)})
    assert len(caplog.records) == MAX_LOGGED
    decode(ChatRequest, **{"x" * 10**6: 1})
    assert all(len(one.getMessage()) < 200 for one in caplog.records)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\r\nSet-Cookie: b", "a??Set-Cookie? b"),
        ("\x00\x7f\u202e\N{SNOWMAN}ü", "?????"),
        ("x" * 10**6, "x" * 64),
        ("", ""),
    ],
)
def test_the_header_is_safe(
    name: str, shown: str, headers: dict[bytes, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    decode(ChatRequest, **{name: 1})
    assert ignored(headers) == shown
    assert all("\n" not in one.getMessage() for one in caplog.records)


def test_the_header_is_short(headers: dict[bytes, bytes]) -> None:
    decode(ChatRequest, **{f"{number:02}" * 30: 1 for number in range(MAX_UNKNOWN)})
    assert len(found := ignored(headers)) < 600
    assert found.endswith("...")


def test_of_a_doubled_key_the_last_one_counts() -> None:
    body = b'{"prompt": "x", "colour": 1, "colour": 2, "max_tokens": 1, "max_tokens": 2}'
    assert decode_body(body, CompletionRequest).max_tokens == 2


def test_every_response_names_them(serve: Serve) -> None:
    body = {"prompt": "one two", "colour": "red", "a\r\nX-Bad": 1, "max_tokens": 5}
    served = serve(allowed_origins="*")
    with served.client(headers={"Origin": "http://a.example"}) as client:

        def post(**given: Any) -> httpx.Response:
            return client.post("/v1/completions", json=body | given)

        answers = [post(), post(stream=True), post(temperature=9)]
        plain = client.post("/v1/completions", json={"prompt": "x"})
    assert [one.status_code for one in answers] == [200, 200, 400]
    for answer in answers:
        assert answer.headers["x-ignored-fields"] == "a??X-Bad, colour"
        assert "x-bad" not in answer.headers
        exposed = answer.headers["access-control-expose-headers"]
        for name in ("X-Ignored-Fields", "X-Ignored-Tools", "Retry-After"):
            assert name in exposed
    assert "x-ignored-fields" not in plain.headers
