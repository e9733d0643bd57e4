"""OpenAI's requests as fields of `GenerateRequest`."""

from typing import Any

import msgspec

from penstock.protocol.messages.client import ChatMessage
from penstock.protocol.messages.sampling import SamplingParams
from penstock.protocol.messages.structured import StructuredOutputs
from penstock.protocol.transport.channel import DECODE_ERRORS
from penstock.services.http.body import decode_json
from penstock.services.http.errors import ApiError
from penstock.services.http.schema import (
    ApiRequest,
    ChatRequest,
    CompletionRequest,
    Message,
    Tool,
    ToolCall,
)
from penstock.services.http.tool_choice import forced_call, forced_tools, is_forced, offered_tools

_KINDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
}
"""field → the field of `StructuredOutputs` that it is"""
_SCHEMA = "response_format.json_schema.schema"
_SAME = [
    name
    for name in SamplingParams.__struct_fields__
    if name not in ("n", "logprobs", "structured_outputs")
] + ["add_special_tokens", "truncate_prompt_tokens", "truncation_side", "cache_salt"]
"""fields that are passed on as they are"""


def chat_fields(request: ChatRequest, tags_are_tokens: bool = False) -> dict[str, Any]:
    """tags_are_tokens: as in `forced_call`. Raises ApiError."""
    fields = _sampling_fields(request)
    fields["messages"] = chat_messages(request.messages)
    fields["max_tokens"] = request.max_completion_tokens or request.max_tokens
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    fields["logprobs"] = (request.top_logprobs or 0) if request.logprobs else None
    for name in ("chat_template", "add_generation_prompt", "continue_final_message"):
        fields[name] = getattr(request, name)
    fields["chat_template_kwargs"] = request.chat_template_kwargs
    if request.reasoning_effort == "none":
        fields["chat_template_kwargs"] = {"enable_thinking": False, **request.chat_template_kwargs}
    if request.tool_choice != "none":
        fields["tools"] = template_tools(offered_tools(request))
    if forced := forced_outputs(request, tags_are_tokens):
        if fields["structured_outputs"]:
            raise ApiError(400, "tool_choice forces a call: the text is given", "tool_choice")
        fields["structured_outputs"] = forced
    return fields


def completion_fields(request: CompletionRequest) -> dict[str, Any]:
    """All but the prompt. Raises ApiError."""
    if request.suffix:
        raise ApiError(
            400, "suffix is not supported: the model writes on, not in between", "suffix"
        )
    fields = _sampling_fields(request)
    fields["logprobs"] = request.logprobs
    if request.max_tokens == 0:
        if not request.echo:
            raise ApiError(
                400, "max_tokens: got 0, expected 1 or more, or echo: true", "max_tokens"
            )
        fields["max_tokens"] = 1  # it is left out of the reply
    if request.echo and request.logprobs is not None:
        if request.stream:
            raise ApiError(400, "echo with logprobs can't be streamed", "stream")
        fields["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    return fields


def prompts_of(request: CompletionRequest) -> list[str | list[int]]:
    """A text, token ids, or a list of either. Raises ApiError."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if all(isinstance(one, int) for one in prompt):
        return [prompt] if prompt else []  # type: ignore[list-item]
    if any(isinstance(one, int) for one in prompt):
        raise ApiError(400, "prompt mixes token ids with texts or lists", "prompt")
    return prompt  # type: ignore[return-value]


def chat_messages(messages: list[Message]) -> list[ChatMessage]:
    """Messages as the chat template sees them. Raises ApiError."""
    return [
        ChatMessage(
            role="system" if one.role == "developer" else one.role,
            content=_text(one, f"messages[{number}].content"),
            name=one.name,
            reasoning_content=one.reasoning_content or one.reasoning,
            tool_calls=[_template_call(call) for call in one.tool_calls or []] or None,
            tool_call_id=one.tool_call_id,
        )
        for number, one in enumerate(messages)
    ]


def template_tools(tools: list[Tool]) -> list[dict[str, Any]] | None:
    """Tools as the chat template sees them."""
    return msgspec.to_builtins(tools) if tools else None


def _sampling_fields(request: ApiRequest) -> dict[str, Any]:
    if request.prompt_logprobs is not None and request.stream:
        raise ApiError(400, "prompt_logprobs can't be streamed", "prompt_logprobs")
    if request.best_of not in (None, request.n):
        sentence = f"best_of is {request.best_of}; what differs from n is not supported"
        raise ApiError(400, sentence, "best_of")
    if request.truncate_prompt_tokens == 0:
        sentence = "truncate_prompt_tokens: got 0, expected -1 or more than 0"
        raise ApiError(400, sentence, "truncate_prompt_tokens")
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options: needs stream: true", "stream_options")
    fields = {name: getattr(request, name) for name in _SAME}
    own = {"structured_outputs": structured_outputs(request), "priority": request.priority}
    return fields | own


def truncated(fields: dict[str, Any], max_model_len: int) -> dict[str, Any]:
    """`fields` with the number of tokens that `truncate_prompt_tokens: -1` stands for."""
    if fields["truncate_prompt_tokens"] == -1:
        fields["truncate_prompt_tokens"] = max(1, max_model_len - (fields["max_tokens"] or 1))
    return fields


def _text(message: Message, path: str) -> str:
    """Return the text of a message, at `path`. Raises ApiError."""
    content = message.content
    if content is None and message.role != "assistant":
        sentence = f"{path}: got null, expected a string or a list of text parts"
        raise ApiError(400, sentence, path)
    if not isinstance(content, list):
        return content or ""
    for number, part in enumerate(content):
        if part.type != "text":
            path = f"{path}[{number}].type"
            sentence = f"{path}: got {part.type!r}, expected 'text', which is all the model reads"
            raise ApiError(400, sentence, path)
    return "\n".join(part.text for part in content)


def _template_call(call: ToolCall) -> dict[str, Any]:
    """`arguments` as a map; what an assistant has written that is none stays text."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            decoded = decode_json(arguments or "{}")
        except DECODE_ERRORS:
            decoded = None
        arguments = decoded if isinstance(decoded, dict) else arguments
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": call.type, "function": function}


def structured_outputs(request: ApiRequest) -> StructuredOutputs | None:
    """What the text must match, from whichever field says it. Raises ApiError if two do."""
    names = _given(request)
    if len(names) > 1:
        raise ApiError(400, f"give one of {' and '.join(names)}", names[1])
    if not names:
        return None
    name = names[0]
    if name == "structured_outputs":
        return request.structured_outputs
    if name == "response_format":
        return _response_format(request)
    return _checked(name, _KINDS[name], getattr(request, name))


def forced_outputs(request: ChatRequest, tags_are_tokens: bool) -> StructuredOutputs | None:
    """The grammar of a call that must be made; None where the model is free. Raises ApiError.

    tags_are_tokens: as in `forced_call`.
    """
    grammar = forced_call(request, tags_are_tokens)
    return _checked(_tools_path(request), "grammar", grammar) if grammar else None


def name_as_sent(field: str | None, request: ApiRequest) -> str | None:
    """Return the client's name for a field of `GenerateRequest`."""
    if field == "structured_outputs":
        return _path(request)
    if field == "max_tokens" and getattr(request, "max_completion_tokens", None) is not None:
        return "max_completion_tokens"
    return field


def _path(request: ApiRequest) -> str:
    """Of the field that says what the text must match."""
    if isinstance(request, ChatRequest) and is_forced(request):
        return _tools_path(request)
    name = next(iter(_given(request)), "structured_outputs")
    return _SCHEMA if name == "response_format" else name


def _given(request: ApiRequest) -> list[str]:
    names = [name for name in ("structured_outputs", *_KINDS) if getattr(request, name) is not None]
    given = request.response_format
    if given is not None and given.type != "text":
        names.append("response_format")
    return names


def _tools_path(request: ChatRequest) -> str:
    """Of the parameters that a grammar was made of; just `tools` if there are several."""
    forced = forced_tools(request)
    if len(forced) != 1:
        return "tools"
    return f"tools[{request.tools.index(forced[0])}].function.parameters"


def _checked(path: str, kind: str, value: Any) -> StructuredOutputs:
    """Raises ApiError for what `StructuredOutputs` refuses, naming the request's field."""
    try:
        return msgspec.convert({kind: value}, StructuredOutputs)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"{path}: {error}", path) from error


def _response_format(request: ApiRequest) -> StructuredOutputs | None:
    given = request.response_format
    assert given is not None  # noqa: S101  for mypy
    if given.type == "json_object":
        return StructuredOutputs(json_object=True)
    if given.json_schema is None or given.json_schema.schema is None:
        raise ApiError(400, f"{_SCHEMA} is missing", _SCHEMA)
    return _checked(_SCHEMA, "json", given.json_schema.schema)
