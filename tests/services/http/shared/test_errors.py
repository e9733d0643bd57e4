"""Bodies that are refused, and errors in OpenAI's shape."""

import json

import pytest
from starlette.exceptions import HTTPException

from penstock.protocol.client.session import RequestError
from penstock.protocol.decoding import FINITE, UNICODE, undecodable_value
from penstock.protocol.messages.client import ErrorReply
from penstock.services.http.generation.schema import ChatRequest, CompletionRequest
from penstock.services.http.shared.body import decode_body
from penstock.services.http.shared.errors import (
    ApiError,
    as_api_error,
    error_response,
    fields_as_sent,
)


def refusal(body: bytes, kind: type = CompletionRequest) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decode_body(body, kind)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "the body: got invalid JSON"),
        (b"{", "the body: got invalid JSON"),
        (b"\xff", "the body: got invalid JSON"),
        (b'{"prompt": "aaa\xff"}', "position 15"),  # of the body, not of the string
        (b'"\\ud800"', "the body: got an invalid UTF-16 surrogate"),
        (b'{"prompt": "\\ud800"}', "prompt: got an invalid UTF-16 surrogate"),
        (b"[" * 100_000, "the body: "),
        (b'{"prompt": "x", "metadata": ' + b"[" * 900 + b"]" * 900 + b"}", "metadata: "),
        (b'{"a":' * 100_000, "the body: "),
        (b'{"prompt": 1e999}', "prompt: "),
        (b'{"prompt": "x", "metadata": {"a": ' + b"9" * 400 + b"}}", "metadata.a: "),
        (b'{"prompt": "x", "seed": ' + b"9" * 400 + b"}", "seed: "),
        (b"[]", "the body: got an array, expected a JSON object"),
        (b"1", "the body: got a number, expected a JSON object"),
        (b'"x"', "the body: got a string, expected a JSON object"),
        (b"null", "the body: got null, expected a JSON object"),
    ],
)
def test_a_body_that_can_not_be_read(body: bytes, sentence: str) -> None:
    assert sentence in refusal(body).body.error.message


def test_depth_has_a_limit() -> None:
    def body(levels: int) -> bytes:
        return b'{"prompt": "x", "metadata": {"a": %s}}' % (b"[" * levels + b"]" * levels)

    decode_body(body(63), CompletionRequest)
    error = refusal(body(64)).body.error
    assert (error.param, error.message.partition(":")[0]) == ("metadata", "metadata")
    assert "64 levels" in error.message


TEXT: dict[str, object] = {"prompt": "x"}
CHAT: dict[str, object] = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (TEXT | {"temperature": 3}, "temperature: got 3, expected"),
        ({"prompt": {"a": 5}}, "prompt: got {'a': 5}, expected `str | array`"),
        ({}, "prompt: got nothing, expected a value"),
        ({"prompt": [1, -1]}, "prompt[1]: got -1, expected `int` >= 0"),
        ({"prompt": 5}, "prompt: got 5, expected `str | array`"),
        (TEXT | {"logit_bias": {"5": 999}}, "logit_bias.5: got 999, expected `float` <= 100"),
        (
            TEXT | {"logit_bias": {"1": 1, "a": 1}},
            "logit_bias: got the key 'a', expected `int`",
        ),
        (TEXT | {"stop": ["y" * 300]}, f"stop[0]: got '{'y' * 59}…, expected"),
        (TEXT | {"seed": 10**30}, "seed: got NaN or a number beyond 64 bits"),
        (TEXT | {"seed": -(2**63) - 1}, "seed: got NaN or a number beyond 64 bits"),
        (
            TEXT | {"metadata": {"a": [1, {"b": -(10**400)}]}},
            "metadata.a[1].b: got NaN or a number beyond 64 bits",
        ),
        (
            TEXT | {"response_format": {"type": "yaml"}},
            "response_format.type: got 'yaml', expected 'json_object' or 'json_schema' or 'text'",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "robot"}]},
            "messages[1].role: got 'robot', expected 'assistant' or 'developer' or 'system' or ",
        ),
        ({"messages": [{"content": "x"}]}, "messages[0].role: got nothing, expected"),
        (
            CHAT | {"tools": [{"type": "retrieval"}]},
            "tools[0].type: got 'retrieval', expected 'function'; "
            "only functions that the client runs are supported: leave other tools out",
        ),
        (CHAT | {"tool_choice": "some"}, "tool_choice: got 'some', expected 'auto' or 'none' or "),
        (
            CHAT | {"tool_choice": {"type": "any"}},
            "tool_choice.type: got 'any', expected 'function' or 'allowed_tools'",
        ),
    ],
)
def test_the_path_of_the_field_its_value_and_the_limit(
    body: dict[str, object], message: str
) -> None:
    kind = ChatRequest if "messages" in body else CompletionRequest
    error = refusal(json.dumps(body).encode(), kind).body.error
    assert error.param == message.partition(":")[0]
    assert error.message.startswith(message)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (b"1e999", FINITE),
        (b"-1e999", FINITE),
        (b"1.5", None),
        (b'"\\ud83d\\ude00"', None),
        (b'"a\\ud800b"', UNICODE),
        (b'{"\\udfff": 1}', UNICODE),
    ],
)
def test_undecodable_values(value: bytes, problem: str | None) -> None:
    expected = problem and ("temperature", problem)
    assert undecodable_value(b'{"prompt": "x", "temperature": %s}' % value) == expected
    assert undecodable_value(b"{") is None


@pytest.mark.parametrize("include_usage", [b"true", b"null"])
def test_openais_stream_options(include_usage: bytes) -> None:
    options = b'{"include_usage": %b, "include_obfuscation": false}' % include_usage
    decode_body(b'{"prompt": "x", "stream_options": %s}' % options, CompletionRequest)


def test_an_integer_may_have_a_point() -> None:
    """Clients without integers, and those that read JSON into floats, write `8.0`."""
    body = b'{"prompt": "x", "n": 2.0, "max_tokens": 1e2, "temperature": 1.0, "seed": -0.0}'
    request = decode_body(body, CompletionRequest)
    assert (request.n, request.max_tokens, request.temperature, request.seed) == (2, 100, 1.0, 0)
    for number in ("8.5", "1e300", "true", '"8"'):
        error = refusal(b'{"prompt": "x", "max_tokens": %b}' % number.encode()).body.error
        assert error.param == "max_tokens"


def test_a_byte_order_mark_is_ignored() -> None:
    request = decode_body(b'\xef\xbb\xbf{"prompt": "x"}', CompletionRequest)
    assert request.prompt == "x"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ErrorReply(code="invalid", message="m", field="f"), 400, "invalid_request_error"),
        (ErrorReply(code="overloaded", message="m", retry_after=1.2), 429, "rate_limit_error"),
        (ErrorReply(code="overloaded", message="m"), 503, "server_error"),
        (ErrorReply(code="failed", message="m"), 500, "server_error"),
    ],
)
def test_errors_of_the_pipeline(error: ErrorReply, status: int, kind: str) -> None:
    api_error = as_api_error(RequestError(error))
    assert api_error.status == status
    assert api_error.body.error.type == kind
    assert api_error.body.error.message == "m"
    assert api_error.body.error.param == error.field
    assert api_error.headers.get("Retry-After") == {429: "2", 503: "1"}.get(status)


def test_errors_of_starlette_and_ours() -> None:
    assert as_api_error(HTTPException(405)).status == 405
    assert as_api_error(ZeroDivisionError("secret")).status == 500
    assert "secret" not in as_api_error(ZeroDivisionError("secret")).body.error.message


@pytest.mark.parametrize("name", ["prompt", "input"])
def test_a_prompt_that_is_too_long_as_clients_recognize_it(name: str) -> None:
    sentence = "prompt: got 9 tokens, expected up to 8"
    reply = ErrorReply(code="invalid", message=sentence, field="prompt", too_long=(9, 8))
    with pytest.raises((ApiError, RequestError)) as caught, fields_as_sent({"prompt": name}.get):
        raise RequestError(reply)
    error = as_api_error(caught.value)
    detail = json.loads(error_response(error, for_anthropic=False).body)["error"]
    assert (detail["code"], detail["param"]) == ("context_length_exceeded", name)
    assert detail["message"] == sentence.replace("prompt", name)
    response = error_response(error, "/v1/messages")
    assert response.status_code == 400
    detail = json.loads(response.body)["error"]
    assert detail["type"] == "invalid_request_error"
    assert detail["message"] == "prompt is too long: 9 tokens > 8 maximum"
