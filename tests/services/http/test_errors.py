"""Bodies that are refused, and errors in OpenAI's shape."""

import msgspec
import pytest
from starlette.exceptions import HTTPException

from penstock.protocol.client.errors import RequestError
from penstock.protocol.messages.client import ErrorReply
from penstock.services.http.body import decode_body
from penstock.services.http.errors import ApiError, as_api_error
from penstock.services.http.schema import ChatRequest, CompletionRequest


def refusal(body: bytes, kind: type = CompletionRequest) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decode_body(body, kind)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff",
        b'"\\ud800"',
        b"[" * 100_000,
        b'{"prompt": "x", "metadata": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"a":' * 100_000,
        b'{"prompt": 1e999}',
        b'{"prompt": "x", "metadata": {"a": ' + b"9" * 400 + b"}}",
        b'{"prompt": "x", "seed": ' + b"9" * 400 + b"}",
        b"[]",
        b"1",
        b"null",
    ],
)
def test_a_body_that_can_not_be_read(body: bytes) -> None:
    assert refusal(body).body.error.message


def test_depth_has_a_limit() -> None:
    def body(levels: int) -> bytes:
        return b'{"prompt": "x", "metadata": {"a": %s}}' % (b"[" * levels + b"]" * levels)

    decode_body(body(63), CompletionRequest)
    error = refusal(body(64)).body.error
    assert (error.param, error.message.partition(" is ")[0]) == ("metadata", "metadata")
    assert "64 levels" in error.message


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"prompt": "x", "temperature": 3}, "temperature", "temperature is 3: expected"),
        ({"prompt": "x", "foo": 1}, "foo", "foo is not a field of this request"),
        ({}, "prompt", "prompt is missing"),
        ({"prompt": [1, -1]}, "prompt", "prompt[1] is -1: expected `int` >= 0"),
        (
            {"prompt": "x", "logit_bias": {"5": 999}},
            "logit_bias",
            "logit_bias[...] is {'5': 999}: exp",
        ),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "logit_bias is {'a': 1}: exp"),
        ({"prompt": "x", "stop": ["y" * 300]}, "stop", f"stop[0] is '{'y' * 59}…: expected"),
    ],
)
def test_the_field_its_value_and_the_limit(
    body: dict[str, object], param: str, message: str
) -> None:
    error = refusal(msgspec.json.encode(body)).body.error
    assert error.param == param
    assert error.message.startswith(message)


def test_a_field_deep_inside() -> None:
    body = {"messages": [{"role": "user"}, {"role": "robot"}]}
    error = refusal(msgspec.json.encode(body), ChatRequest).body.error
    assert error.param == "messages"
    assert error.message.startswith("messages[1].role is 'robot': ")


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
    assert api_error.headers.get("Retry-After") == ("2" if status == 429 else None)


def test_errors_of_starlette_and_ours() -> None:
    assert as_api_error(HTTPException(405)).status == 405
    assert as_api_error(ZeroDivisionError("secret")).status == 500
    assert "secret" not in as_api_error(ZeroDivisionError("secret")).body.error.message
