"""Conversations as OpenAI's clients write them, and as chat templates read them."""

from collections import Counter
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from penstock.protocol.messages.client import ChatMessage


class MessageError(ValueError):
    """A message that a text model can't read: its field, and the reason."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


# types of parts, as in OpenAI's API and in vLLM
_TEXTS = ("text", "refusal", "input_text", "output_text")


class ContentPart(Struct, kw_only=True):
    """A part of a message; only text is supported."""

    type: str
    text: str | None = None
    refusal: str | None = None  # text of an assistant's refusal


class FunctionCall(Struct, kw_only=True):
    """A called function and its arguments: JSON text, or the map itself."""

    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Struct, kw_only=True):
    """A call in an assistant's message."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Struct, kw_only=True):
    """One message. Unknown fields are ignored: clients send back the messages they received."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of `reasoning_content`
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


Conversation = Annotated[list[Message], Meta(min_length=1)]


def chat_messages(messages: list[Message]) -> list[ChatMessage]:
    """Return messages for the chat template. Raises MessageError."""
    made = [
        ChatMessage(
            role=message.role,
            content=_text(message, f"messages[{number}].content"),
            name=message.name,
            reasoning_content=_reasoning(message),
            tool_calls=[_template_call(call) for call in message.tool_calls or []] or None,
            tool_call_id=message.tool_call_id,
        )
        for number, message in enumerate(messages)
    ]
    for number, message in enumerate(made):
        if message.tool_calls and len(message.tool_calls) > 1:
            _sort_results(made, number, [str(call["id"]) for call in message.tool_calls])
    return made


def _sort_results(messages: list[ChatMessage], number: int, calls: list[str]) -> None:
    """Sort the results after a message into the order of its calls. Raises MessageError.

    Templates of Qwen do not show the ids: the model finds the result of a call by its place.
    Results without ids, and calls of which none has a result, stay as they are.
    """
    begin = end = number + 1
    while end < len(messages) and messages[end].role == "tool":
        end += 1
    found = [message.tool_call_id or "" for message in messages[begin:end]]
    if not found or not all(calls) or not all(found):
        return
    num_calls, num_found = Counter(calls), Counter(found)
    for place, call in enumerate(calls):
        if num_found[call] != 1 or num_calls[call] != 1:
            problem = f"got {call!r:.200}, expected one tool message with its result after the call"
            raise MessageError(f"messages[{number}].tool_calls[{place}].id", problem)
    if len(found) > len(calls):
        problem = "got a result of no call of the assistant's message before, expected none"
        raise MessageError(f"messages[{begin}].tool_call_id", problem)
    by_call = dict(zip(found, messages[begin:end], strict=True))
    messages[begin:end] = [by_call[call] for call in calls]


def _reasoning(message: Message) -> str | None:
    """Return the reasoning. Keep an empty string: for None, templates look for `</think>`."""
    given = message.reasoning_content
    return message.reasoning if given is None else given


def _text(message: Message, path: str) -> str | list[str]:
    """Return the text of a message, or of its parts. path: path of its content.

    Raises MessageError.
    """
    content = message.content
    if content is None and message.role != "assistant":
        raise MessageError(path, "got null, expected a string or a list of text parts")
    if not isinstance(content, list):
        return content or ""
    texts = []
    for number, part in enumerate(content):
        if part.type not in _TEXTS:
            sentence = f"got {part.type!r}, expected 'text': the model reads text only"
            raise MessageError(f"{path}[{number}].type", sentence)
        field = "refusal" if part.type == "refusal" else "text"
        if getattr(part, field) is None:
            raise MessageError(f"{path}[{number}].{field}", "got nothing, expected a string")
        texts.append(getattr(part, field))
    return texts if len(texts) > 1 else "".join(texts)


def _template_call(call: ToolCall) -> dict[str, Any]:
    """Return a call with `arguments` as JSON, which has integers that MessagePack lacks."""
    arguments = call.function.arguments
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": call.type, "function": function}
