"""Answers as responses: whole, and as events, which add up to the same."""

import json
from typing import Any

import msgspec
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from penstock.protocol.messages.client import FinishReason, GenerateReply, Usage
from penstock.services.http.generation.chat import ChatChoice
from penstock.services.http.responses.routes import ResponseEvents, begun
from penstock.services.http.responses.schema import (
    Reasoning,
    ResponseReply,
    ResponsesRequest,
    ResponseTool,
)
from penstock.services.http.responses.to_chat_request import chat_request, input_items, offer
from penstock.services.http.shared.app_state import TagIds, ToolFormat
from penstock.services.http.shared.errors import ENCODER, ApiError
from tests.search import scaled
from tests.services.http.generation.reasoning_spans import delta, reply
from tests.services.http.generation.tool_call_texts import FORMATS, SCHEMA, Texts
from tests.services.http.responses.assembled import assembled, without_ids

EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
TOOL = ResponseTool(type="function", name="f", parameters=SCHEMA)
THOUGHT = "<think>\nhm\n</think>\n\n"
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TAGS = TagIds(*([ord(letter) for letter in tag] for tag in ("</think>", "<tool_call>")))


def request(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest(input="hi", temperature=0.5, top_p=1.0, **fields)


def events_of(asked: ResponsesRequest, form: Any = "hermes") -> ResponseEvents:
    tools = offer(asked.tools)
    chat = chat_request(asked, input_items(asked), tools)
    choice = ChatChoice(0, chat, ToolFormat(form))
    response = begun(asked, tools, "m")
    return ResponseEvents(response, choice, tools.names, TAGS, lambda _: None)


def reply_of(text: str, finish_reason: FinishReason = "stop") -> GenerateReply:
    usage = Usage(prompt_tokens=7, cached_tokens=2, output_tokens=len(text))
    return reply(text, finish_reason, token_ids=[ord(one) for one in text], usage=usage)


def streamed(events: ResponseEvents, pieces: list[str], end: GenerateReply) -> list[Any]:
    """Return the events of pieces, each with a token a character, decoded from JSON."""
    new = [delta(one, end.text, token_ids=[ord(letter) for letter in one]) for one in pieces]
    found = [sent(event) for one in new for event in events.events(one, None)]
    return found + [sent(event) for event in events.events(None, end)]


def sent(event: Any) -> Any:
    """Return an event as a client decodes it; later events change what it refers to."""
    return json.loads(ENCODER.encode(event))


def decoded(response: ResponseReply) -> dict[str, Any]:
    return msgspec.json.decode(ENCODER.encode(response))  # type: ignore[no-any-return]


def whole(text: str, *args: Any, **fields: Any) -> dict[str, Any]:
    return decoded(events_of(request(**fields)).whole(reply_of(text, *args)))


@pytest.mark.search
@pytest.mark.parametrize("form", FORMATS)
def test_events_add_up_to_the_whole_response(form: Any) -> None:
    texts = Texts(form, seed=4)
    for number in range(scaled(60)):
        thought = texts.random.choice(["", THOUGHT, "<think>", "<think>\n</think>"])
        answer = thought + (texts.answer() or "a")
        asked = request(tools=[TOOL] * (number % 4 > 0), parallel_tool_calls=number % 3 > 0)
        finish: FinishReason = "length" if number % 5 == 0 else "stop"
        end = reply_of(answer, finish)
        expected = without_ids(decoded(events_of(asked, form).whole(end)))
        for pieces in (list(answer), texts.cuts(answer), [answer]):
            found = assembled(streamed(events_of(asked, form), pieces, end))
            assert without_ids(found) == expected, answer


def test_reasoning_text_and_calls_are_items() -> None:
    response = whole(f"{THOUGHT}so\n{CALL}\n{CALL}", tools=[TOOL])
    assert [item["type"] for item in response["output"]] == [
        *("reasoning", "message", "function_call", "function_call")
    ]
    thought, message, first, second = response["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert thought["summary"] == []
    part = {"type": "output_text", "text": "so", "annotations": [], "logprobs": []}
    assert (message["role"], message["content"]) == ("assistant", [part])
    assert (first["name"], first["arguments"]) == ("f", '{"a": 1}')
    assert first["call_id"] != second["call_id"]
    assert len({item["id"] for item in response["output"]}) == 4
    assert response["status"] == "completed"
    assert response["incomplete_details"] is response["error"] is None


def test_usage() -> None:
    usage = whole(f"{THOUGHT}so")["usage"]
    num_thought = len("<think>\nhm\n</think>")
    assert usage == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": len(THOUGHT) + 2,
        "output_tokens_details": {"reasoning_tokens": num_thought},
        "total_tokens": 7 + len(THOUGHT) + 2,
    }
    cut = whole("<think>\nhm", "length")["usage"]
    assert cut["output_tokens_details"] == {"reasoning_tokens": len("<think>\nhm")}
    assert whole("so")["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize("mention", ["", "<tool_call> begins a call\n"])
@pytest.mark.parametrize("end", ["", "\nso"])
def test_a_call_in_reasoning_that_does_not_end_is_not_reasoning(mention: str, end: str) -> None:
    thought = f"<think>\nhm\n{mention}"
    response = whole(f"{thought}{CALL}{end}", tools=[TOOL])
    kinds = ["reasoning", "function_call", "message"]
    assert [item["type"] for item in response["output"]] == kinds[: 3 if end else 2]
    details = response["usage"]["output_tokens_details"]
    assert details == {"reasoning_tokens": len(thought)}


@pytest.mark.parametrize(
    ("text", "kinds"), [("so", ["message"]), (CALL[:-15], ["function_call"]), ("", ["message"])]
)
def test_an_answer_that_is_cut_off_is_incomplete(text: str, kinds: list[str]) -> None:
    response = whole(text, "length", tools=[TOOL], tool_choice="required")
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["completed_at"] is None
    assert [(item["type"], item["status"]) for item in response["output"]] == [
        (kind, "incomplete") for kind in kinds
    ]
    events = events_of(request(tools=[TOOL], tool_choice="required"))
    found = streamed(events, list(text), reply_of(text, "length"))
    ends = [one["type"] for one in found if one["type"].endswith(".done")]
    assert "response.function_call_arguments.done" not in ends  # clients would run the call
    assert ends[-1] == "response.output_item.done"


def test_an_answer_without_text_has_a_piece() -> None:
    """`vllm bench serve` counts an answer without a piece as failed."""
    found = streamed(events_of(request()), [], reply_of(""))
    pieces = [one["delta"] for one in found if one["type"] == "response.output_text.delta"]
    assert pieces == [""]
    assert found[-1]["type"] == "response.completed"


def test_a_failure_ends_the_open_item() -> None:
    events = events_of(request())
    found = [sent(one) for one in events.events(delta("so"), None)]
    response = assembled(found + [sent(one) for one in events.failed(ApiError(500, "broken"))])
    assert response["error"] == {"code": "server_error", "message": "broken"}
    assert response["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ApiError(400, "no", too_long=(9, 8)), "context_length_exceeded"),
        (ApiError(400, "no"), "invalid_prompt"),
    ],
)
def test_a_refusal_is_no_error_of_the_server(error: ApiError, code: str) -> None:
    events = events_of(request())
    assert list(events.failed(error))
    assert events.reply.error
    assert events.reply.error.code == code


def test_the_request_is_repeated() -> None:
    response = whole("so", tools=[TOOL], reasoning=Reasoning(effort="low"), metadata={"a": "b"})
    tool = {"type": "function", "name": "f", "parameters": SCHEMA}
    assert response["tools"] == [tool | {"description": None, "strict": None}]
    assert response["reasoning"] == {"effort": "low", "summary": None}
    assert response["metadata"] == {"a": "b"}
    assert (response["temperature"], response["top_p"]) == (0.5, 1.0)
    assert response["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
    assert (response["store"], response["service_tier"]) == (True, "default")


def test_events_have_the_types_of_the_openai_package() -> None:
    """Validate with the package's models, strictly; its client would accept anything."""
    asked = request(tools=[TOOL], reasoning=Reasoning(effort="low"))
    text = f"{THOUGHT}so{CALL}"
    events = streamed(events_of(asked), list(text), reply_of(text))
    kinds = {type(EVENT.validate_python(one)).__name__ for one in events}
    assert {"ResponseReasoningTextDeltaEvent", "ResponseFunctionCallArgumentsDoneEvent"} <= kinds
    assert len(kinds) == len({one["type"] for one in events})
    cut = whole("so", "length")
    assert Response.model_validate(cut).output_text == "so"
