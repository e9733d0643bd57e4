"""Answers of the HTTP APIs, whole and streamed, in the form that `launch chaos` compares."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from penstock.launch.chaos.check import Content, Received
from penstock.launch.chaos.mix import HttpCall

Data = dict[str, Any]


async def read_answer(client: httpx.AsyncClient, call: HttpCall, received: Received) -> Any:
    """Yield after each piece of an answer that was added to `received`."""
    try:
        async with client.stream("POST", call.path, json=call.body) as reply:
            if reply.status_code != httpx.codes.OK:
                received.error = f"{reply.status_code}: {(await reply.aread()).decode()[:300]}"
            elif not call.stream:
                received.reply = _whole(call.path, json.loads(await reply.aread()))
            else:
                async for data in _events(reply):
                    _add(call.path, data, received)
                    yield
                if not received.is_over:  # chats and messages repeat nothing at their end
                    received.reply = received.streamed
    except httpx.HTTPError as error:
        received.error = f"{type(error).__name__}: {error}"
    yield


async def _events(reply: httpx.Response) -> AsyncIterator[Data]:
    """Yield the data of each event. Lines end with "\\n" alone: a text may have U+2028."""
    rest = b""
    async for piece in reply.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield json.loads(line[6:])


def _add(path: str, data: Data, received: Received) -> None:
    """Add an event of a stream."""
    if error := data.get("error") or (data["type"] == "error" if "type" in data else None):
        received.error = json.dumps(error if isinstance(error, dict) else data)[:300]
    elif path == "/v1/responses":
        _add_response_event(data, received)
    elif path == "/v1/messages":
        _add_message_event(data, received.streamed)
    else:
        for choice in data["choices"]:
            _add_choice(choice, choice["delta"], received.streamed)


def _add_choice(choice: Data, message: Data, content: Content) -> None:
    """Add a choice of a chat, or a part of one."""
    index = choice["index"]
    content.extend(f"{index}.reasoning", message.get("reasoning_content") or "")
    content.extend(f"{index}.content", message.get("content") or "")
    for position, call in enumerate(message.get("tool_calls") or []):
        place = f"{index}.call.{call.get('index', position)}"
        content.extend(f"{place}.name", call["function"].get("name") or "")
        content.extend(f"{place}.arguments", call["function"].get("arguments") or "")
    content.extend(f"{index}.logprobs", (choice.get("logprobs") or {}).get("content") or [])
    if choice.get("finish_reason"):
        content.finish = (content.finish or {}) | {index: choice["finish_reason"]}


def _add_response_event(data: Data, received: Received) -> None:
    """Add an event of the Responses API; the last one has the whole answer."""
    parts = {
        "response.output_text.delta": "text",
        "response.reasoning_text.delta": "reasoning",
        "response.function_call_arguments.delta": "arguments",
    }
    if part := parts.get(data["type"]):
        received.streamed.extend(f"{data['output_index']}.{part}", data["delta"])
    elif data["type"] in ("response.completed", "response.incomplete"):
        received.reply = _response(data["response"])
    elif data["type"] == "response.failed":
        received.error = json.dumps(data["response"].get("error"))


def _add_message_event(data: Data, content: Content) -> None:
    """Add an event of the Messages API."""
    match data:
        case {"type": "content_block_start", "index": index, "content_block": {"name": str(name)}}:
            content.extend(f"{index}.name", name)
        case {"type": "content_block_delta", "index": index, "delta": delta}:
            for part in ("text", "thinking", "partial_json"):
                content.extend(f"{index}.{part}", delta.get(part, ""))
        case {"type": "message_delta", "delta": delta}:
            content.finish = delta["stop_reason"], delta["stop_sequence"]


def _whole(path: str, data: Data) -> Content:
    """Return the content of a reply that is not streamed."""
    content = Content()
    if path == "/v1/responses":
        return _response(data)
    if path == "/v1/messages":
        for index, block in enumerate(data["content"]):
            for part in ("text", "thinking", "name"):
                content.extend(f"{index}.{part}", block.get(part, ""))
            content.extend(f"{index}.input", json.dumps(block.get("input", "")))
        content.finish = data["stop_reason"], data["stop_sequence"]
        return content
    for choice in data["choices"]:
        _add_choice(choice, choice["message"], content)
    return content


def _response(data: Data) -> Content:
    """Return the content of a response of the Responses API."""
    content = Content(finish=(data["status"], data.get("incomplete_details")))
    for index, item in enumerate(data["output"]):
        part = "reasoning" if item["type"] == "reasoning" else "text"
        for piece in item.get("content") or []:
            content.extend(f"{index}.{part}", piece.get("text", ""))
        content.extend(f"{index}.arguments", item.get("arguments", ""))
    return content
