"""Fields next to `use_beam_search`: which change nothing, and which are refused by name."""

from typing import Any

import msgspec
import pytest

from penstock.services.http.generation.beam_search import check_beam_fields
from penstock.services.http.generation.schema import ApiRequest, ChatRequest, CompletionRequest
from penstock.services.http.generation.to_generate_request import chat_fields, completion_fields
from penstock.services.http.shared.body import decode_body
from penstock.services.http.shared.errors import ApiError

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def check(kind: type[ApiRequest], given: dict[str, Any]) -> None:
    content = {"prompt": "hi"}
    if kind is ChatRequest:
        content = {"messages": [{"role": "user", "content": "hi"}]}  # type: ignore[dict-item]
    body = msgspec.json.encode({"use_beam_search": True, **content, **given})
    request = decode_body(body, kind)
    to_fields: Any = chat_fields if kind is ChatRequest else completion_fields
    check_beam_fields(request, to_fields(request))


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", []),
        ("stop_token_ids", []),
        ("bad_words", []),
        ("repetition_penalty", 1.0),
        ("repetition_penalty", 1),
        ("presence_penalty", 0),
        ("logit_bias", {}),
        ("logit_bias", {"7": 0.0}),
        ("min_tokens", 0),
        ("response_format", {"type": "text"}),
        ("temperature", 0.7),
        ("echo", True),
    ],
)
def test_neutral_values_are_accepted(kind: type[ApiRequest], name: str, value: Any) -> None:
    if name != "echo" or kind is CompletionRequest:
        check(kind, {name: value})


@pytest.mark.parametrize(
    ("kind", "given", "field"),
    [
        (CompletionRequest, {"repetition_penalty": 1.1}, "repetition_penalty"),
        (CompletionRequest, {"stop": ["x"]}, "stop"),
        (CompletionRequest, {"logit_bias": {"7": 0, "8": 1}}, "logit_bias"),
        (CompletionRequest, {"echo": True, "logprobs": 0}, "echo"),
        (CompletionRequest, {"prompt_logprobs": 0}, "prompt_logprobs"),
        (CompletionRequest, {"response_format": {"type": "json_object"}}, "response_format"),
        (CompletionRequest, {"regex": "a"}, "regex"),
        (
            ChatRequest,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format",
        ),
        (ChatRequest, {"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        (CompletionRequest, {"max_tokens": 0}, "max_tokens"),
        (CompletionRequest, {"max_tokens": 0, "echo": True}, "max_tokens"),
    ],
)
def test_a_refusal_names_what_was_sent(
    kind: type[ApiRequest], given: dict[str, Any], field: str
) -> None:
    with pytest.raises(ApiError, match=rf"^{field}: got .* with use_beam_search$") as caught:
        check(kind, given)
    assert caught.value.body.error.param == field
    assert "or echo" not in str(caught.value)
