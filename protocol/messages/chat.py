"""Conversations as OpenAI's clients write them, and as chat templates read them."""

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
    text: str = ""
    refusal: str = ""  # text of an assistant's refusal


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
    return [
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


def _reasoning(message: Message) -> str | None:
    """Return the reasoning. Keep an empty string: for None, templates look for `</think>`."""
    given = message.reasoning_content
    return message.reasoning if given is None else given


def _text(message: Message, path: str) -> str:
    """Return the text of a message. path: path of its content. Raises MessageError."""
    content = message.content
    if content is None and message.role != "assistant":
        raise MessageError(path, "got null, expected a string or a list of text parts")
    if not isinstance(content, list):
        return content or ""
    for number, part in enumerate(content):
        if part.type not in _TEXTS:
            sentence = f"got {part.type!r}, expected 'text': the model reads text only"
            raise MessageError(f"{path}[{number}].type", sentence)
    return "\n".join(part.refusal if part.type == "refusal" else part.text for part in content)


def _template_call(call: ToolCall) -> dict[str, Any]:
    """Return a call with `arguments` as a map; invalid JSON stays text."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            decoded = msgspec.json.decode(arguments or "{}")
            msgspec.msgpack.encode(decoded)
        except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError):
            decoded = None
        arguments = decoded if isinstance(decoded, dict) else arguments
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": call.type, "function": function}
