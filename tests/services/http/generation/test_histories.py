"""A conversation that a client sends back renders to the tokens that were generated.

Otherwise the model would read other calls than it wrote, and the prefix cache would miss.
"""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.protocol.messages.client import GenerateReply, PromptFields, TextDelta
from penstock.services.http.generation.chat import ChatChoice
from penstock.services.http.generation.schema import ChatRequest
from penstock.services.http.generation.to_generate_request import chat_fields
from penstock.services.http.messages import MessageEvents, MessagesRequest
from penstock.services.http.messages import chat_request as of_messages
from penstock.services.http.responses.routes import ResponseEvents, begun
from penstock.services.http.responses.schema import ResponsesRequest
from penstock.services.http.responses.to_chat_request import chat_request as of_responses
from penstock.services.http.responses.to_chat_request import input_items, offer
from penstock.services.http.shared.app_state import TagIds, ToolFormat
from penstock.services.http.shared.body import decode_body
from penstock.services.http.shared.errors import ENCODER
from penstock.services.tokenizer.chat_template import ChatTemplate
from tests.services.http.generation.reasoning_spans import END_THINK, deltas, tagged
from tests.services.http.generation.test_reasoning import reply_of

TEMPLATE = Path(__file__).parents[2] / "chat_templates" / "agent.jinja"
FORM = ToolFormat("qwen3_coder")
SCHEMA = {
    "type": "object",
    "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "number"}}}},
    "properties": {
        "path": {"type": "string"},
        "line": {"type": "integer"},
        "is_new": {"type": "boolean"},
        "point": {"$ref": "#/$defs/Point"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "any": {},
    },
}
USER = {"role": "user", "content": "Look at both."}
RESULTS = ["first\n", "<b>&amp; second</b>"]
Pieces = list[TextDelta]


def call(*values: tuple[str, str]) -> str:
    body = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in values)
    return f"<tool_call>\n<function=look>\n{body}</function>\n</tool_call>"


ANSWERS = {
    "types": call(
        ("path", "größe 日本.txt"),
        ("line", "17"),
        ("is_new", "true"),
        ("point", '{"x": 1.5}'),
        ("tags", '["a", "ü\\n"]'),
        ("maybe", "null"),
    ),
    "odd strings": call(
        ("path", "\n\n  <a>\n</parameter> <parameter x>\n&lt;</a>\n"),
        ("maybe", "5"),
        ("any", "007"),
    ),
    "no arguments": call(),
    "an empty string": call(("path", "")),
}


def rendered(request: ChatRequest, folder: Path) -> str:
    fields = chat_fields(request, FORM)
    prompt = {name: fields[name] for name in PromptFields.__struct_fields__ if name in fields}
    frame = msgspec.msgpack.encode(PromptFields(**prompt))
    return ChatTemplate(folder).render(msgspec.msgpack.decode(frame, type=PromptFields))


def chat(body: dict[str, Any]) -> ChatRequest:
    tool = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    return decode_body(msgspec.json.encode(body | {"tools": [tool]}), ChatRequest)


def after_chat(pieces: Pieces, end: GenerateReply, thinks: bool) -> tuple[ChatRequest, ChatRequest]:
    """Return the first request, and the request after its answer, both as chats."""
    kwargs = {"chat_template_kwargs": {"enable_thinking": thinks}}
    first = chat({"messages": [USER]} | kwargs)
    choice = ChatChoice(0, first, FORM)
    chunks = [one for new in pieces for one in choice.chunks(new, None)]
    chunks += choice.chunks(None, end)
    answer: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    calls: list[Any] = []
    for delta in (msgspec.to_builtins(chunk.delta) for chunk in chunks):
        answer["content"] += delta.get("content") or ""
        answer["reasoning_content"] += delta.get("reasoning_content") or ""
        for piece in delta.get("tool_calls") or []:
            if "id" in piece:
                calls.append(piece)
            else:
                calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
    results = [
        {"role": "tool", "content": text, "tool_call_id": one["id"]}
        for one, text in zip(calls, RESULTS, strict=False)
    ]
    turns = [USER, answer | {"tool_calls": calls}, *reversed(results)]
    return first, chat({"messages": turns} | kwargs)


def after_message(
    pieces: Pieces, end: GenerateReply, thinks: bool
) -> tuple[ChatRequest, ChatRequest]:
    tool = {"name": "look", "input_schema": SCHEMA}
    fields: dict[str, Any] = {"max_tokens": 99, "tools": [tool]}
    fields["thinking"] = {"type": "adaptive" if thinks else "disabled"}

    def asked(*turns: Any) -> ChatRequest:
        body = msgspec.json.encode(fields | {"messages": turns})
        return of_messages(decode_body(body, MessagesRequest), 99)

    first = asked(USER)
    events = MessageEvents("msg", "m", first, FORM)
    for new in pieces:
        list(events.events(new, None))
    list(events.events(None, end))
    content = msgspec.json.decode(ENCODER.encode(events.reply))["content"]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": text}
        for block, text in zip(
            (block for block in content if block["type"] == "tool_use"), RESULTS, strict=False
        )
    ]
    answer = {"role": "assistant", "content": content}
    return first, asked(USER, answer, {"role": "user", "content": results[::-1]})


def after_response(
    pieces: Pieces, end: GenerateReply, thinks: bool
) -> tuple[ChatRequest, ChatRequest]:
    tool = {"type": "function", "name": "look", "parameters": SCHEMA}
    fields: dict[str, Any] = {"tools": [tool], "temperature": 1.0, "top_p": 1.0}
    fields |= {"presence_penalty": 0.0, "chat_template_kwargs": {"enable_thinking": thinks}}

    def decoded(*items: Any) -> ResponsesRequest:
        return decode_body(msgspec.json.encode(fields | {"input": items}), ResponsesRequest)

    def asked(request: ResponsesRequest) -> ChatRequest:
        return of_responses(request, input_items(request), offer(request.tools))

    request = decoded(USER)
    first, tools = asked(request), offer(request.tools)
    response = begun(request, tools, "m")
    choice = ChatChoice(0, first, FORM)
    events = ResponseEvents(response, choice, tools.names, TagIds([END_THINK], []), lambda _: None)
    for new in pieces:
        list(events.events(new, None))
    list(events.events(None, end))
    output = msgspec.json.decode(ENCODER.encode(response))["output"]
    calls = [item for item in output if item["type"] == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": text}
        for item, text in zip(calls, RESULTS, strict=False)
    ]
    return first, asked(decoded(USER, *output, *reversed(results)))


APIS = {"chat": after_chat, "messages": after_message, "responses": after_response}


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("text", ["", "I look:\n\n* a\n* b"])
@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("api", APIS)
def test_what_was_generated_comes_back(
    tmp_path: Path, api: str, name: str, text: str, thinks: bool
) -> None:
    """Also the results, which clients may send in another order."""
    (tmp_path / "chat_template.jinja").write_bytes(TEMPLATE.read_bytes())
    calls = f"{ANSWERS[name]}\n{call(('line', '1'))}"
    answer = f"{text}\n\n{calls}" if text else calls
    generated = f"Both. 1 < 2\n\n`<x>`\n</think>\n\n{answer}" if thinks else answer
    pieces = deltas([[token] for token in tagged(generated)], starts_reasoning=thinks)
    first, later = APIS[api](pieces, reply_of(pieces, "stop"), thinks)
    prompt = rendered(first, tmp_path)
    assert prompt.endswith("<think>\n" if thinks else "<think>\n\n</think>\n\n")
    expected = f"{prompt}{generated}<|im_end|>\n<|im_start|>user"
    for result in RESULTS:
        expected += f"\n<tool_response>\n{result.strip()}\n</tool_response>"
    assert rendered(later, tmp_path).startswith(expected + "<|im_end|>\n")


def test_the_prompts_of_forty_turns_only_grow(tmp_path: Path) -> None:
    """So that each turn computes its own tokens alone: results of calls, or a question."""
    (tmp_path / "chat_template.jinja").write_bytes(TEMPLATE.read_bytes())
    draw = random.Random(8)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, USER]
    before = ""
    for turn in range(40):
        request = chat({"messages": messages})
        prompt = rendered(request, tmp_path)
        assert prompt.startswith(before)
        calls = [draw.choice([*ANSWERS.values()]) for _ in range(draw.randrange(3))]
        text = draw.choice(["", "So:\n\n1. <a>", "größer 🙂"]) if calls else f"Done {turn}."
        answer = "\n\n".join(filter(None, [text, "\n".join(calls)]))
        generated = f"Turn {turn}.\n\nHm </th\n</think>\n\n{answer}"
        pieces = deltas([tagged(generated)], starts_reasoning=True)
        choice = msgspec.to_builtins(ChatChoice(0, request, FORM).whole(reply_of(pieces, "stop")))
        messages.append(choice["message"])
        made = choice["message"].get("tool_calls", [])
        results = [
            {"role": "tool", "content": f"{turn}: ok\n", "tool_call_id": one["id"]} for one in made
        ]
        messages += results or [{"role": "user", "content": f"And {turn}?"}]
        before = f"{prompt}{generated}<|im_end|>\n<|im_start|>user\n"
    assert rendered(chat({"messages": messages}), tmp_path).startswith(before)


@pytest.mark.parametrize("api", APIS)
def test_a_call_that_was_cut_off_can_come_back(tmp_path: Path, api: str) -> None:
    """The client may send it back with an error as its result."""
    (tmp_path / "chat_template.jinja").write_bytes(TEMPLATE.read_bytes())
    generated = f"Both.\n</think>\n\n{ANSWERS['odd strings'][:60]}"
    pieces = deltas([[token] for token in tagged(generated)], starts_reasoning=True)
    _, later = APIS[api](pieces, reply_of(pieces, "length"), True)
    text = rendered(later, tmp_path)
    assert '<parameter=INVALID_JSON>\n{"path": "' in text
    assert text.count("<function=look>") == 1
