"""`/v1/messages` and `/v1/messages/count_tokens`, as Anthropic's API has them."""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field
from starlette.responses import Response

from penstock.protocol.decoding import is_too_deep
from penstock.protocol.messages.chat import FunctionCall, Message, ToolCall
from penstock.protocol.messages.client import GenerateReply, TextDelta
from penstock.protocol.messages.sampling import Stop, Temperature, TopK, TopP
from penstock.protocol.transport.channel import DECODE_ERRORS
from penstock.services.http.generation.chat import (
    ChatChoice,
    ChatEvents,
    Event,
    PartKind,
    count_prompt_tokens,
    submit_chat,
)
from penstock.services.http.generation.schema import (
    CalledTool,
    ChatRequest,
    Function,
    FunctionName,
    JsonSchema,
    NamedTool,
    ResponseFormat,
    Tool,
    ToolName,
)
from penstock.services.http.shared.access import caller
from penstock.services.http.shared.app_state import EVENT_STREAM, AppState, Operation, ToolFormat
from penstock.services.http.shared.body import (
    is_declined,
    refuse_forced,
    report_declined,
)
from penstock.services.http.shared.errors import ApiError, invalid, json_response, messages_error

MessageStop = (
    Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    | Literal["model_context_window_exceeded", "pause_turn"]
)
# the only key of a call's input whose text is not a JSON object, as Anthropic recommends
INVALID_JSON = "INVALID_JSON"
# beginning of a block that Claude's tools add to `system`. The block differs in every request, so
# later tokens would never be in the prefix cache.
_BILLING = "x-anthropic-billing-header:"
_NAMES = {
    "stop": "stop_sequences",
    "response_format.json_schema.schema": "output_config.format.schema",
    "chat_template_kwargs": "thinking",
    "continue_final_message": "messages",
}
SIGNATURE = "unsigned"  # signature of thinking blocks: clients require and return it
# kind of a block → type of an event with more of its text, and the field with the text
_DELTAS: dict[PartKind, tuple[str, str]] = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class TextBlock(Struct, kw_only=True, tag_field="type", tag="text"):
    """Text."""

    text: str


class ThinkingBlock(Struct, kw_only=True, tag_field="type", tag="thinking"):
    """Reasoning of the assistant."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Struct, kw_only=True, tag_field="type", tag="redacted_thinking"):
    """Encrypted reasoning, which only Anthropic can read; it is ignored."""


class ToolUseBlock(Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Struct, kw_only=True, tag_field="type", tag="tool_result"):
    """The result of a call."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


class UserTurn(Struct, kw_only=True, tag_field="role", tag="user"):
    """A message of the user, or results of calls."""

    content: str | list[TextBlock | ToolResultBlock]


AssistantBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock


class AssistantTurn(Struct, kw_only=True, tag_field="role", tag="assistant"):
    """An answer; as the last message, the beginning of an answer that is to be continued."""

    content: str | list[AssistantBlock]


class SystemTurn(Struct, kw_only=True, tag_field="role", tag="system"):
    """Instructions within a conversation."""

    content: str | list[TextBlock]


class MessagesTool(Struct, kw_only=True):
    """A tool that the client executes, or one of Anthropic's, which is left out.

    `input_schema`: the JSON schema of its input.
    """

    name: ToolName | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolUseChoice(Struct, kw_only=True):
    """Calls that the model may make (`auto`), or must make (`any`, `tool`)."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None  # name of the tool, with `tool`
    disable_parallel_tool_use: bool = False


class ThinkingConfig(Struct, kw_only=True):
    """Reasoning before the answer, if the chat template has a switch for reasoning."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    # changes nothing: `max_tokens` limits reasoning and answer together
    budget_tokens: int | None = None


class JsonOutputFormat(Struct, kw_only=True):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, kw_only=True):
    """Form of the answer."""

    format: JsonOutputFormat | None = None
    effort: str | None = None  # `reasoning_effort` of the chat template


class MessagesFields(Struct, kw_only=True):
    """Fields of a message, and of the count of its prompt's tokens."""

    model: str | None = None
    messages: Annotated[list[UserTurn | AssistantTurn | SystemTurn], Meta(min_length=1)]
    system: str | list[TextBlock] = ""
    tools: list[MessagesTool] = field(default_factory=list)
    tool_choice: ToolUseChoice | None = None
    thinking: ThinkingConfig | None = None  # default: disabled
    stop_sequences: Annotated[list[Stop], Meta(max_length=16)] = field(default_factory=list)
    stream: bool = False
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutputFormat | None = None  # older name of `output_config.format`
    mcp_servers: Annotated[list[Any], Meta(max_length=0)] = field(default_factory=list)
    # conversations that the server keeps: refused, so the client sends the whole conversation
    thread: Any = None
    context_management: Any = None  # changes nothing


class CountTokensRequest(MessagesFields, kw_only=True):
    """`POST /v1/messages/count_tokens`."""

    max_tokens: Annotated[int, Meta(ge=0)] | None = None


class MessagesRequest(MessagesFields, kw_only=True):
    """`POST /v1/messages`."""

    # maximum tokens of reasoning and answer; 0 only fills the prefix cache
    max_tokens: Annotated[int, Meta(ge=0)]


AnyRequest = MessagesRequest | CountTokensRequest
AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(Struct, kw_only=True):
    """Token counts; the prompt is the sum of the first three, as in Anthropic's API.

    `cache_creation_input_tokens` counts tokens that this request added to the prefix cache.
    """

    input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0


class MessageReply(Struct, kw_only=True, tag_field="type", tag="message"):
    """Reply to MessagesRequest."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock] = field(default_factory=list)
    stop_reason: MessageStop | None = None
    stop_sequence: str | None = None
    usage: MessageUsage = field(default_factory=MessageUsage)


class TokenCount(Struct, kw_only=True):
    """Reply to CountTokensRequest."""

    input_tokens: int


def chat_request(request: AnyRequest, max_model_len: int) -> ChatRequest:
    """Return the same request in OpenAI's form. Raises ApiError."""
    if request.thread is not None:
        sentence = "thread: got one, expected null: send the whole conversation"
        raise ApiError(400, sentence, "thread", "thread_unsupported_request")
    thinks = request.thinking is not None and request.thinking.type != "disabled"
    max_tokens = max_model_len if request.max_tokens is None else request.max_tokens
    output = request.output_config or OutputConfig()
    output_format = output.format or request.output_format
    return ChatRequest(
        model=request.model,
        messages=_messages(request),
        max_tokens=min(max_tokens, max_model_len),
        max_completion_tokens=None if max_tokens else 1,  # not part of the reply
        stream=request.stream,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        stop=request.stop_sequences or None,
        tools=_tools(request),
        **_tool_choice(request),
        chat_template_kwargs={"enable_thinking": thinks},
        reasoning_effort=output.effort,
        include_reasoning=thinks,
        continue_final_message=isinstance(request.messages[-1], AssistantTurn),
        response_format=_response_format(output_format) if output_format else None,
    )


def name_in_messages(request: AnyRequest, name: str) -> str:
    """Return Anthropic's name for a field of ChatRequest."""
    if found := re.match(r"tools\[(\d+)\](\.function)?", name):
        name = f"tools[{_kept(request)[int(found[1])]}]{name[found.end() :]}"
    if name.startswith("messages["):  # of messages that were joined or split
        return "messages"
    return _NAMES.get(name, re.sub(r"^(tools\[\d+\])\.parameters", r"\1.input_schema", name))


def _messages(request: AnyRequest) -> list[Message]:
    """Return the conversation; successive messages of one role become one message."""
    _check_calls(request.messages)
    system = [block for block in _blocks(request.system) if not block.text.startswith(_BILLING)]
    messages = [Message(role="system", content=_text(system))] if system else []
    for kind, turns in groupby(request.messages, type):
        blocks: list[Any] = [block for turn in turns for block in _blocks(turn.content)]
        if kind is AssistantTurn:
            messages.append(_assistant(blocks))
        else:
            messages += _inputs("system" if kind is SystemTurn else "user", blocks)
    if messages and messages[-1].tool_calls:
        raise invalid("messages", "got tool_use at the end, expected its tool_result after it")
    return messages


def _check_calls(turns: Sequence[UserTurn | AssistantTurn | SystemTurn]) -> None:
    """Raise ApiError unless each tool_use has one tool_result in the user's next message."""
    waiting = dict[str, str]()  # id of a call without a result → its path
    for number, turn in enumerate(turns):
        follows_user = number > 0 and isinstance(turns[number - 1], UserTurn)
        if waiting and isinstance(turn, AssistantTurn) and follows_user:
            name, path = next(iter(waiting.items()))
            problem = f"got {name!r:.200}, expected its tool_result in the user's next message"
            raise invalid(f"{path}.id", problem)
        for place, block in enumerate(_blocks(turn.content)):
            path = f"messages[{number}].content[{place}]"
            if isinstance(block, ToolUseBlock):
                if block.id in waiting:
                    raise invalid(f"{path}.id", f"got {block.id!r:.200} again, expected another id")
                waiting[block.id] = path
            elif isinstance(block, ToolResultBlock) and not waiting.pop(block.tool_use_id, None):
                problem = "expected the id of a tool_use in the assistant's last message, once"
                raise invalid(f"{path}.tool_use_id", f"got {block.tool_use_id!r:.200}, {problem}")


def _blocks(content: str | Sequence[Any]) -> Sequence[Any]:
    if isinstance(content, str):
        return [TextBlock(text=content)] if content else []
    return content


def _text(blocks: Iterable[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks)


def _assistant(blocks: list[AssistantBlock]) -> Message:
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    return Message(
        role="assistant",
        content=_text(block for block in blocks if isinstance(block, TextBlock)),
        reasoning_content="\n".join(thoughts) or None,
        tool_calls=[_call(block) for block in calls] or None,
    )


def _call(block: ToolUseBlock) -> ToolCall:
    given = block.input
    text = given.get(INVALID_JSON) if len(given) == 1 else None
    arguments = text if isinstance(text, str) else given
    return ToolCall(id=block.id, function=FunctionCall(name=block.name, arguments=arguments))


def _inputs(role: Any, blocks: list[TextBlock | ToolResultBlock]) -> list[Message]:
    """Return messages for results of calls, which must follow their calls, and for the texts."""
    messages = [_result(block) for block in blocks if isinstance(block, ToolResultBlock)]
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    if texts or not messages:
        messages.append(Message(role=role, content=_text(texts)))
    return messages


def _result(block: ToolResultBlock) -> Message:
    text = _text(_blocks(block.content or ""))
    if block.is_error:
        text = f"Error: {text}"
    return Message(role="tool", content=text, tool_call_id=block.tool_use_id)


def _tools(request: AnyRequest) -> list[Tool]:
    """Return the tools that the client executes. Raises ApiError for unknown and forced tools."""
    choice, kept = request.tool_choice, _kept(request)
    report_declined(tool.type or "" for tool in request.tools)
    if choice and choice.type in ("any", "tool"):
        forced = [
            tool for tool in request.tools if choice.type == "any" or tool.name == choice.name
        ]
        if all(is_declined(tool.type) for tool in forced):
            kinds = (tool.type or "" for tool in forced)
            refuse_forced("tool_choice", choice.name or choice.type, kinds)
    return [_tool(request.tools[number], f"tools[{number}]") for number in kept]


def _kept(request: AnyRequest) -> list[int]:
    """Return the indices of the tools that are not left out."""
    return [number for number, tool in enumerate(request.tools) if not is_declined(tool.type)]


def _tool(tool: MessagesTool, path: str) -> Tool:
    if tool.type not in (None, "custom"):
        problem = "expected 'custom', or a tool that may be left out, such as 'web_search'"
        raise invalid(f"{path}.type", f"got {tool.type!r:.60}, {problem}; leave other tools out")
    for name in ("name", "input_schema"):
        if getattr(tool, name) is None:
            raise invalid(f"{path}.{name}", "got nothing, expected a value; the field is required")
    function = Function(
        name=tool.name or "",
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )
    return Tool(type="function", function=function)


def _tool_choice(request: AnyRequest) -> dict[str, Any]:
    choice = request.tool_choice
    if choice is None:
        return {}
    if choice.type == "tool" and choice.name is None:
        raise invalid("tool_choice.name", "got nothing, expected the name of a tool")
    kinds = {"any": "required", "tool": NamedTool(function=FunctionName(name=choice.name or ""))}
    return {
        "tool_choice": kinds.get(choice.type, choice.type),
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
    }


def _response_format(given: JsonOutputFormat) -> ResponseFormat:
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=given.schema))


class MessageEvents(ChatEvents):
    """Converter of one answer, which fills a message."""

    keep_alive = b'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(
        self,
        message_id: str,
        model: str,
        request: ChatRequest,
        form: ToolFormat,
        cached_block: int = 0,
    ) -> None:
        """Start a message. cached_block: tokens of a prefix cache block; 0: no prefix cache."""
        self._cached_block = cached_block
        self._max_tokens = request.max_tokens or 0
        self._message = MessageReply(id=message_id, model=model)
        super().__init__(ChatChoice(0, request, form), self._message, self._message.content)

    def _start(self, first: TextDelta | GenerateReply | None) -> Iterator[Event]:
        if first:
            counts = first if isinstance(first, TextDelta) else first.usage
            self._message.usage = self._usage(counts.prompt_tokens, counts.cached_tokens)
        yield {"type": "message_start", "message": self._message}

    def failed(self, error: ApiError) -> list[Event]:
        """Return the event of an error after the first event."""
        return [messages_error(error)]

    def _new_part(self, kind: PartKind, call: CalledTool | None) -> AnswerBlock:
        if call:
            return ToolUseBlock(id=call.id or "", name=call.function.name or "", input={})
        return ThinkingBlock(thinking="") if kind == "reasoning" else TextBlock(text="")

    def _begun(self, part: AnswerBlock) -> Iterator[Event]:
        yield self._of_block("content_block_start", content_block=part)

    def _added(self, kind: PartKind, text: str) -> Event:
        name, field = _DELTAS[kind]
        return self._of_block("content_block_delta", delta={"type": name, field: text})

    def _of_block(self, name: str, **fields: Any) -> Event:
        """Return an event about the last block."""
        return {"type": name, "index": len(self._message.content) - 1, **fields}

    def _closed(self, part: AnswerBlock, text: str, _: bool) -> Iterator[Event]:
        match part:
            case TextBlock():
                part.text = text
            case ThinkingBlock():
                part.thinking, part.signature = text, SIGNATURE
                signature = {"type": "signature_delta", "signature": SIGNATURE}
                yield self._of_block("content_block_delta", delta=signature)
            case ToolUseBlock():
                part.input = _input(text)
        yield self._of_block("content_block_stop")

    def _end(self, reply: GenerateReply) -> Iterator[Event]:
        yield from self._close()
        message, num_tokens = self._message, len(reply.token_ids)
        stop = reply.stop_reason if isinstance(reply.stop_reason, str) else None
        match self._choice.finish_reason(reply):
            case "tool_calls":
                message.stop_reason = "tool_use"
            case "stop" if stop:
                message.stop_reason, message.stop_sequence = "stop_sequence", stop
            case "stop":
                message.stop_reason = "end_turn"
            case "length" if num_tokens < self._max_tokens:
                message.stop_reason = "model_context_window_exceeded"
            case "length":
                message.stop_reason = "max_tokens"
            case _:  # aborted: the client may send the answer back to continue
                message.stop_reason = "pause_turn"
        usage = reply.usage
        message.usage = self._usage(usage.prompt_tokens, usage.cached_tokens, num_tokens)
        end = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        yield {"type": "message_delta", "delta": end, "usage": message.usage}
        yield {"type": "message_stop"}

    def _usage(
        self, prompt_tokens: int, cached_tokens: int, output_tokens: int = 0
    ) -> MessageUsage:
        """Return the token counts. An equal prompt later reads both the read and created tokens."""
        size, created = self._cached_block, 0
        if size:
            created = max(0, (prompt_tokens - 1) // size * size - cached_tokens)
        return MessageUsage(
            input_tokens=prompt_tokens - cached_tokens - created,
            cache_creation_input_tokens=created,
            cache_read_input_tokens=cached_tokens,
            output_tokens=output_tokens,
        )


def _input(text: str) -> dict[str, Any]:
    """Return a call's input; if the text is not an object, an object with the text.

    A call that is cut off before its arguments has an empty input, as in Anthropic's API.
    """
    if not text:
        return {}
    try:
        decoded = msgspec.json.decode(text)
    except DECODE_ERRORS:
        decoded = None
    is_input = isinstance(decoded, dict) and not is_too_deep(decoded)
    return decoded if is_input else {INVALID_JSON: text}


async def answer_messages(state: AppState, request: MessagesRequest) -> Response:
    """Answer a conversation in Anthropic's form."""
    chat = chat_request(request, state.max_model_len)
    chat.request_id = caller.get().request_id or None
    generation = submit_chat(state, "msg", chat, partial(name_in_messages, request))
    message_id = f"msg_{caller.get().unique_id}"
    model, form = generation.head["model"], state.tool_format
    events = MessageEvents(message_id, model, chat, form, state.cached_block)
    return await events.response(generation, request.stream)


async def count_tokens(state: AppState, request: CountTokensRequest) -> Response:
    """Return the length of the prompt of such a conversation."""
    chat = chat_request(request, state.max_model_len)
    number = await count_prompt_tokens(state, chat, partial(name_in_messages, request))
    return json_response(TokenCount(input_tokens=number))


OPERATIONS = [
    Operation("POST", "/v1/messages", answer_messages, MessageReply, MessagesRequest, EVENT_STREAM),
    Operation("POST", "/v1/messages/count_tokens", count_tokens, TokenCount, CountTokensRequest),
]
