"""Answers as Anthropic's events and messages."""

import random
from typing import Any

import msgspec
import pytest

from penstock.protocol.messages.chat import Message
from penstock.protocol.messages.client import FinishReason, GenerateReply, Usage
from penstock.services.http.generation.schema import ChatRequest, Function, Tool
from penstock.services.http.messages import MessageEvents
from penstock.services.http.shared.app_state import HERMES, ToolFormat
from penstock.services.http.shared.errors import ApiError
from tests.search import scaled
from tests.services.http.generation.reasoning_spans import delta
from tests.services.http.generation.reasoning_spans import reply as reply_of
from tests.services.http.generation.tool_call_texts import FORMATS, SCHEMA, Texts

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def converter(form: Any = "hermes", max_tokens: int = 9, **fields: Any) -> MessageEvents:
    tools = [Tool(type="function", function=Function(name="f", parameters=SCHEMA))]
    messages = [Message(role="user")]
    request = ChatRequest(messages=messages, tools=tools, max_tokens=max_tokens, **fields)
    return MessageEvents("msg-1", "demo", request, ToolFormat(form))


def reply(text: str, finish_reason: FinishReason = "stop", **fields: Any) -> GenerateReply:
    usage = Usage(prompt_tokens=20, cached_tokens=16, output_tokens=3)
    return reply_of(text, finish_reason, token_ids=[1, 2, 3], usage=usage, **fields)


def streamed(events: MessageEvents, pieces: list[str], end: GenerateReply) -> list[Any]:
    """Return the events as a client decodes them."""
    prompt = {"prompt_tokens": 20, "cached_tokens": 16}
    new = [(delta(piece, end.text, **prompt), None) for piece in pieces]
    data = b"".join(events.encode(events.events(*one)) for one in (*new, (None, end)))
    decoded = []
    for event in data.decode().split("\n\n")[:-1]:
        name, body = event.split("\n")
        decoded.append(msgspec.json.decode(body.removeprefix("data: ")))
        assert name == f"event: {decoded[-1]['type']}"
    return decoded


def added_up(events: list[Any]) -> Any:
    """Return the message, by the protocol's rules, of which none may be broken."""
    started, *blocks, ending, ended = events
    message = started["message"]
    assert (started["type"], ended) == ("message_start", {"type": "message_stop"})
    assert (message["content"], message["stop_reason"]) == ([], None)
    content, is_open = message["content"], False
    for event in blocks:
        assert is_open == (event["type"] != "content_block_start")
        if event["type"] == "content_block_start":
            content.append(event["content_block"] | {"json": ""})
        is_open = event["type"] != "content_block_stop"
        assert event["index"] == len(content) - 1
        if event["type"] == "content_block_delta":
            _add(content[-1], event["delta"])
    for block in content:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = _input(text)
    assert not is_open
    assert ending.pop("type") == "message_delta"
    return message | ending.pop("delta") | ending


def _add(block: Any, delta: Any) -> None:
    kind = delta.pop("type")
    (name, text), *rest = delta.items()
    assert not rest
    allowed = {"text_delta": "text", "input_json_delta": "tool_use"}
    assert block["type"] == allowed.get(kind, "thinking")
    assert text
    name = "json" if name == "partial_json" else name
    block[name] += text


def _input(text: str) -> Any:
    try:
        decoded = msgspec.json.decode(text)
    except msgspec.DecodeError:
        decoded = None
    if not text:
        return {}
    return decoded if isinstance(decoded, dict) else {"INVALID_JSON": text}


def whole(events: MessageEvents, end: GenerateReply) -> Any:
    return msgspec.to_builtins(events.whole(end))


def without_ids(message: Any) -> Any:
    for block in message["content"]:
        if block["type"] == "tool_use":
            assert block.pop("id")
    return message


@pytest.mark.search
@pytest.mark.parametrize("form", FORMATS)
def test_the_events_are_the_message_however_the_text_is_cut(form: Any) -> None:
    for seed in range(scaled(300)):
        chance = random.Random(seed)
        text = Texts(form, seed).answer()
        if chance.random() < 0.5:
            thought = chance.choice(["", "so", "a\nb\n"])
            text = f"<think>\n{thought}\n</think>\n\n{text}"
        cuts = sorted(chance.choices(range(len(text) + 1), k=chance.randrange(12)))
        cuts = list(range(len(text))) if chance.random() < 0.2 else cuts
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        end = reply(text, chance.choice(["stop", "length"]))
        got = added_up(streamed(converter(form), pieces, end))
        assert without_ids(got) == without_ids(whole(converter(form), end)), (seed, pieces)


def test_blocks_of_all_kinds() -> None:
    text = f"<think>\nwell\n</think>\n\nhere:\n{CALL}\n{CALL.replace('1', '[')}"
    message = whole(converter(), reply(text))
    call = {"type": "tool_use", "name": "f"}
    assert without_ids(message)["content"] == [
        {"type": "thinking", "thinking": "well", "signature": "unsigned"},
        {"type": "text", "text": "here:"},
        call | {"input": {"a": 1}},
        call | {"input": {"INVALID_JSON": '{"a": [}}'}},
    ]
    assert message["stop_reason"] == "tool_use"
    assert message["usage"] == {
        "input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 16,
        "output_tokens": 3,
    }


@pytest.mark.parametrize(
    ("end", "given"), [("", {}), (', "arguments": {"a"', {"INVALID_JSON": '{"a"'})]
)
def test_input_of_a_call_that_is_cut_off(end: str, given: dict[str, str]) -> None:
    """Without arguments it is empty, as it is where Anthropic's client adds events up."""
    cut = f'<tool_call>\n{{"name": "f"{end}'
    message = whole(converter(), reply(cut, "length"))
    assert without_ids(message)["content"] == [{"type": "tool_use", "name": "f", "input": given}]
    assert without_ids(added_up(streamed(converter(), [cut], reply(cut, "length")))) == message


@pytest.mark.parametrize(
    ("block", "created"), [(0, 0), (1, 3), (2, 2), (3, 2), (4, 0), (8, 0), (16, 0), (64, 0)]
)
def test_the_cold_part_of_a_prompt_is_created_in_the_cache(block: int, created: int) -> None:
    """Blocks are whole, and the last token is always computed: 16 of 20 tokens were cached."""
    request = ChatRequest(messages=[Message(role="user")])
    message = whole(MessageEvents("msg-1", "demo", request, HERMES, block), reply("a"))
    usage = message["usage"]
    assert usage["cache_creation_input_tokens"] == created
    assert usage["cache_read_input_tokens"] == 16
    assert usage["input_tokens"] == 4 - created


@pytest.mark.parametrize("pieces", [["a"], []])
def test_the_first_event_has_the_length_of_the_prompt(pieces: list[str]) -> None:
    """Without output before the reply (`max_tokens: 0`), too."""
    started, *_ = streamed(converter(), pieces, reply("".join(pieces)))
    usage = started["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (4, 16)


@pytest.mark.parametrize(
    ("end", "max_tokens", "stop"),
    [
        (reply("a"), 9, ("end_turn", None)),
        (reply("a", stop_reason="b"), 9, ("stop_sequence", "b")),
        (reply("a", stop_reason=151645), 9, ("end_turn", None)),
        (reply(CALL), 9, ("tool_use", None)),
        (reply("a", "length"), 3, ("max_tokens", None)),
        (reply("a", "length"), 9, ("model_context_window_exceeded", None)),
        (reply("a", "abort"), 9, ("pause_turn", None)),
    ],
)
def test_stop_reasons(end: GenerateReply, max_tokens: int, stop: tuple[str, Any]) -> None:
    events = converter(max_tokens=max_tokens)
    message = added_up(streamed(events, [end.text], end))
    assert (message["stop_reason"], message["stop_sequence"]) == stop


def test_thinking_that_was_not_requested_is_left_out() -> None:
    message = whole(converter(include_reasoning=False), reply("<think>\nwell\n</think>\n\nyes"))
    assert message["content"] == [{"type": "text", "text": "yes"}]


def test_an_error_is_an_event() -> None:
    events = converter()
    data = events.encode(events.failed(ApiError(503, "stopping")))
    error = {"type": "overloaded_error", "message": "stopping"}
    name, body, *_ = data.decode().split("\n")
    assert name == "event: error"
    assert msgspec.json.decode(body.removeprefix("data: ")) == {"type": "error", "error": error}
