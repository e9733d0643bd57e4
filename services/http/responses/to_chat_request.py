"""Conversion of requests of `/v1/responses` to chats."""

import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, NoReturn

from msgspec import convert
from msgspec.structs import fields as struct_fields

from penstock.protocol.messages.chat import FunctionCall, Message, ToolCall
from penstock.protocol.messages.sampling import SamplingParams
from penstock.services.http.generation.schema import (
    AllowedTools,
    AllowedToolSet,
    ChatRequest,
    Function,
    FunctionName,
    JsonSchema,
    NamedTool,
    ResponseFormat,
    Tool,
)
from penstock.services.http.responses.schema import (
    AllowedFunctions,
    AnyRequest,
    FunctionTool,
    Item,
    NamedFunction,
    NamespaceTool,
    Parts,
    ResponseTool,
)
from penstock.services.http.shared.body import is_declined, refuse_forced, report_declined
from penstock.services.http.shared.errors import invalid

MAX_FUNCTIONS = 1024  # functions of all namespaces
_TYPES = "'function' or 'namespace', or a tool that may be left out, such as 'web_search'"
# sampling parameter that a response can't return → advice
_UNSERVED = {
    "max_tokens": "send max_output_tokens",
    "logprobs": "chat completions have logprobs",
    "prompt_logprobs": "chat completions have logprobs",
}
_SAMPLING = [field.name for field in struct_fields(SamplingParams) if field.name not in _UNSERVED]
_PLAIN = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
# type of a part → field with its text
_TEXT = dict.fromkeys(_PLAIN, "text") | {"refusal": "refusal"}
_RENAMED = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "truncate_prompt_tokens": "truncation",
}
_ITEM_TYPES = "'message', 'function_call', 'function_call_output' or 'reasoning'"


class OfferedTools(NamedTuple):
    """Functions that the model sees, and the client's names for them."""

    # tools of the request, except the left-out tools
    kept: list[FunctionTool | NamespaceTool]
    functions: list[Tool]
    # path of each function in the request
    paths: list[str]
    # name that the model sees → namespace and name
    names: dict[str, tuple[str | None, str]]
    # types of the tools that are left out
    declined: list[str]


def model_name(namespace: str | None, name: str) -> str:
    """Return the name that the model sees."""
    return f"{namespace}.{name}" if namespace else name


def offer(tools: Iterable[ResponseTool]) -> OfferedTools:
    """Flatten namespaces, and leave out tools that this server can't run. Raises ApiError."""
    offered = OfferedTools([], [], [], {}, [])
    for number, tool in enumerate(tools):
        path = f"tools[{number}]"
        if is_declined(tool.type):
            offered.declined.append(tool.type)
        elif tool.type not in ("function", "namespace"):
            problem = f"got {tool.type!r:.60}, expected {_TYPES}; leave other tools out"
            raise invalid(f"{path}.type", problem)
        elif tool.name is None:
            raise invalid(f"{path}.name", "got nothing, expected a value; the field is required")
        elif tool.type == "function":
            function = convert(tool, FunctionTool, from_attributes=True)
            offered.kept.append(function)
            _add(offered, None, function, path)
        else:
            offered.kept.append(convert(tool, NamespaceTool, from_attributes=True))
            for place, function in enumerate(tool.tools):
                _add(offered, tool.name, function, f"{path}.tools[{place}]")
    report_declined(offered.declined)
    return offered


def _add(offered: OfferedTools, namespace: str | None, tool: FunctionTool, path: str) -> None:
    name = model_name(namespace, tool.name)
    if offered.names.setdefault(name, (namespace, tool.name)) != (namespace, tool.name):
        problem = f"got {tool.name!r}, expected another name: the model would see {name!r} twice"
        raise invalid(f"{path}.name", problem)
    if len(offered.functions) == MAX_FUNCTIONS:
        raise invalid("tools", f"got more than {MAX_FUNCTIONS} functions, which is the limit")
    function = Function(
        name=name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    offered.functions.append(Tool(type="function", function=function))
    offered.paths.append(path)


def chat_request(request: AnyRequest, items: Sequence[Item], tools: OfferedTools) -> ChatRequest:
    """Return the chat. items: items of the previous response and the input. Raises ApiError."""
    for name, advice in _UNSERVED.items():
        if (value := getattr(request, name)) is not None:
            raise invalid(name, f"got {value}, expected null; {advice}")
    if number := request.top_logprobs:
        raise invalid("top_logprobs", f"got {number}, expected 0; {_UNSERVED['logprobs']}")
    messages = _Conversation(len(items) - len(input_items(request))).add(items)
    if request.instructions is not None:
        messages.insert(0, Message(role="system", content=request.instructions))
    return ChatRequest(
        **{name: getattr(request, name) for name in _SAMPLING},
        messages=messages,
        stream=request.stream,
        max_tokens=request.max_output_tokens,
        tools=tools.functions,
        tool_choice=_tool_choice(request.tool_choice, tools),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_response_format(request),
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        truncate_prompt_tokens=-1 if request.truncation == "auto" else None,
        chat_template_kwargs=request.chat_template_kwargs,
        cache_salt=request.cache_salt,
        priority=request.priority,
        request_id=request.request_id,
    )


def input_items(request: AnyRequest) -> list[Item]:
    """Return the input as items."""
    if isinstance(request.input, str):
        return [Item(role="user", content=request.input)]
    return request.input


def name_in_responses(tools: OfferedTools, name: str) -> str:
    """Return the name of a field of ChatRequest in the Responses API."""
    if found := re.match(r"tools\[(\d+)\]", name):
        name = tools.paths[int(found[1])] + name[found.end() :]
    if name.startswith("messages["):  # of items that were joined
        return "input"
    if name.startswith("tool"):
        return name.replace(".allowed_tools.", ".").replace(".function.", ".")
    return _RENAMED.get(name, name)


class _Conversation:
    """Converter of items to messages: an assistant's reasoning, text and calls are joined."""

    def __init__(self, num_stored: int) -> None:
        self._num_stored = num_stored
        self._messages: list[Message] = []
        self._call_ids: set[str] = set()

    def add(self, items: Sequence[Item]) -> list[Message]:
        """Return the messages. Raises ApiError, in which items of the input count from 0."""
        for number, item in enumerate(items):
            self._add(item, f"input[{number - self._num_stored}]")
        return self._messages

    def _add(self, item: Item, path: str) -> None:
        match item.type:
            case "message":
                self._add_message(item, path)
            case "reasoning":
                parts = item.content or item.summary or []
                text = _text(parts, f"{path}.content")
                self._messages.append(Message(role="assistant", content="", reasoning=text))
            case "function_call":
                self._add_call(item, path)
            case "function_call_output":
                self._add_output(item, path)
            case other:
                raise invalid(f"{path}.type", f"got {other!r}, expected {_ITEM_TYPES}")

    def _add_message(self, item: Item, path: str) -> None:
        if item.role is None:
            _refuse_null(f"{path}.role", "'user', 'assistant', 'system' or 'developer'")
        if item.content is None:
            _refuse_null(f"{path}.content", "a string or a list of text parts")
        text = _text(item.content, f"{path}.content")
        last = self._open_message() if item.role == "assistant" else None
        if last and not last.content and not last.tool_calls:
            last.content = text
        else:
            self._messages.append(Message(role=item.role, content=text))

    def _add_call(self, item: Item, path: str) -> None:
        for name in ("call_id", "name", "arguments"):
            if getattr(item, name) is None:
                _refuse_null(f"{path}.{name}", "a string")
        last = self._open_message()
        if last is None:
            last = Message(role="assistant", content="")
            self._messages.append(last)
        if last.tool_calls is None:
            last.tool_calls = []
        name = model_name(item.namespace, item.name or "")
        function = FunctionCall(name=name, arguments=item.arguments or "")
        call = ToolCall(id=item.call_id or "", function=function)
        last.tool_calls.append(call)
        self._call_ids.add(call.id)

    def _add_output(self, item: Item, path: str) -> None:
        if item.call_id not in self._call_ids:
            problem = f"got {item.call_id!r:.200}, expected the call_id of an earlier function_call"
            raise invalid(f"{path}.call_id", problem)
        if item.output is None:
            _refuse_null(f"{path}.output", "a string or a list of text parts")
        text = _text(item.output, f"{path}.output")
        self._messages.append(Message(role="tool", content=text, tool_call_id=item.call_id))

    def _open_message(self) -> Message | None:
        """Return the last message if it is an assistant's."""
        last = self._messages[-1] if self._messages else None
        return last if last and last.role == "assistant" else None


def _text(content: str | Parts, path: str) -> str:
    """Return the text of content at a path. Raises ApiError."""
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        name = _TEXT.get(part.type)
        if name is None:
            problem = f"got {part.type!r:.200}, expected 'input_text' or 'output_text': the model "
            raise invalid(f"{path}[{number}].type", f"{problem}reads text only")
        text: str | None = getattr(part, name)
        if text is None:
            _refuse_null(f"{path}[{number}].{name}", "a string")
        texts.append(text)
    return "\n".join(texts)


def _refuse_null(path: str, expected: str) -> NoReturn:
    raise invalid(path, f"got null, expected {expected}")


def _tool_choice(
    choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions,
    tools: OfferedTools,
) -> Literal["none", "auto", "required"] | NamedTool | AllowedTools:
    if isinstance(choice, NamedFunction):
        return NamedTool(function=FunctionName(name=model_name(choice.namespace, choice.name)))
    if isinstance(choice, AllowedFunctions):
        return _allowed(choice, tools)
    if choice == "required" and not tools.functions:
        refuse_forced("tool_choice", choice, tools.declined)
    return choice


def _allowed(choice: AllowedFunctions, tools: OfferedTools) -> AllowedTools | Literal["none"]:
    """Return the functions that may be called. Raises ApiError."""
    allowed = []
    for number, tool in enumerate(choice.tools):
        path = f"tool_choice.tools[{number}]"
        if is_declined(tool.type):
            continue
        if tool.type != "function":
            raise invalid(f"{path}.type", f"got {tool.type!r:.60}, expected 'function'")
        if tool.name is None:
            _refuse_null(f"{path}.name", "the name of a function")
        name = model_name(tool.namespace, tool.name)
        if name not in tools.names:
            raise invalid(f"{path}.name", f"got {name!r:.200}, expected a function of tools")
        allowed.append(NamedTool(function=FunctionName(name=name)))
    if allowed:
        return AllowedTools(allowed_tools=AllowedToolSet(mode=choice.mode, tools=allowed))
    if choice.mode == "required":
        refuse_forced("tool_choice.mode", choice.mode, [tool.type for tool in choice.tools])
    return "none"


def _response_format(request: AnyRequest) -> ResponseFormat | None:
    form = request.text.format
    if form is None:
        return None
    schema = JsonSchema(name=form.name or "", schema=form.schema)
    return ResponseFormat(type=form.type, json_schema=schema)
