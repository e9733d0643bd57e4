"""Conversion of OpenAI's requests to fields of `GenerateRequest`."""

from typing import Any

import msgspec

from penstock.protocol.messages.chat import chat_messages
from penstock.protocol.messages.client import GenerateRequest, PromptFields
from penstock.protocol.messages.structured import StructuredOutputs
from penstock.services.http.generation.schema import (
    ApiRequest,
    ChatRequest,
    CompletionRequest,
    TokenizeBody,
    Tool,
)
from penstock.services.http.generation.tool_grammar import (
    forced_call,
    forced_tools,
    is_forced,
    offered_tools,
)
from penstock.services.http.shared.app_state import HERMES, ToolFormat
from penstock.services.http.shared.errors import invalid

# field → the same field of `StructuredOutputs`
_KINDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
}
_SCHEMA = "response_format.json_schema.schema"
# fields that have different meanings in chats and completions
_OWN = ("n", "prompt", "messages", "tools", "request_id", "stream")
_SAME = [name for name in GenerateRequest.__struct_fields__ if name not in _OWN]


def chat_fields(request: ChatRequest, form: ToolFormat = HERMES) -> dict[str, Any]:
    """Return the fields of a chat. form: format of tool calls. Raises ApiError, MessageError."""
    fields = _fields(request)
    fields["messages"] = chat_messages(request.messages)
    fields["max_tokens"] = request.max_completion_tokens or request.max_tokens
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs", f"got {request.top_logprobs}, expected logprobs: true, too")
    fields["logprobs"] = (request.top_logprobs or 0) if request.logprobs else None
    fields["chat_template_kwargs"] = template_variables(request)
    if request.tool_choice != "none":
        fields["tools"] = template_tools(offered_tools(request))
    if grammar := forced_call(request, form):
        if fields["structured_outputs"]:
            raise invalid("tool_choice", "got a forced call and a structured output; send one")
        fields["structured_outputs"] = _structured(_tools_path(request), "grammar", grammar)
    return fields


def completion_fields(request: CompletionRequest) -> dict[str, Any]:
    """Return all fields except the prompt. Raises ApiError."""
    if request.suffix:
        raise invalid("suffix", "got a text, expected null: the model can't fill in the middle")
    fields = _fields(request)
    if request.max_tokens == 0:
        if not request.echo:
            raise invalid("max_tokens", "got 0, expected 1 or more, or echo: true")
        fields["max_tokens"] = 1  # the token is left out of the reply
    if request.echo and request.logprobs is not None:
        fields["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    return fields


def prompts_of(
    prompt: str | list[str | int | list[int]], field: str = "prompt"
) -> list[str | list[int]]:
    """Return the prompts of a field, texts or lists of token ids. Raises ApiError."""
    if not prompt:
        raise invalid(field, "got an empty one, expected text or token ids")
    if isinstance(prompt, str):
        return [prompt]
    num_ids = sum(isinstance(item, int) for item in prompt)
    if num_ids == len(prompt):
        return [prompt]  # type: ignore[list-item]
    if num_ids:
        raise invalid(field, "got token ids next to texts or lists, expected one kind")
    return prompt  # type: ignore[return-value]


def template_tools(tools: list[Tool]) -> list[dict[str, Any]] | None:
    """Return tools for the chat template."""
    return msgspec.to_builtins(tools) if tools else None


def template_variables(request: ChatRequest | TokenizeBody) -> dict[str, Any]:
    """Return the variables of the chat template."""
    effort = request.reasoning_effort
    given = {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
    return {**(given if effort else {}), **request.chat_template_kwargs}


def truncated(fields: dict[str, Any], max_model_len: int) -> dict[str, Any]:
    """Return `fields` with a number of tokens in place of `truncate_prompt_tokens: -1`.

    Without `max_tokens`, a quarter of the context is left for the answer.
    """
    if fields["truncate_prompt_tokens"] == -1:
        room = fields["max_tokens"] or max_model_len // 4
        fields["truncate_prompt_tokens"] = max(1, max_model_len - room)
    return fields


def prompt_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that make a prompt."""
    return {name: fields[name] for name in PromptFields.__struct_fields__ if name in fields}


def name_as_sent(field: str, request: ApiRequest) -> str:
    """Return the client's name for a field of `GenerateRequest`."""
    if field == "structured_outputs":
        if isinstance(request, ChatRequest) and is_forced(request):
            return _tools_path(request)
        name = next(iter(_structured_names(request)), field)
        given = request.response_format
        has_schema = name == "response_format" and given and given.type == "json_schema"
        return _SCHEMA if has_schema else name
    if field == "max_tokens" and getattr(request, "max_completion_tokens", None) is not None:
        return "max_completion_tokens"
    return field


def _fields(request: ApiRequest) -> dict[str, Any]:
    """Return the fields that have the same meaning in both kinds of requests."""
    if request.best_of not in (None, request.n):
        raise invalid("best_of", f"got {request.best_of}, expected the value of n, {request.n}")
    if request.truncate_prompt_tokens == 0:
        raise invalid("truncate_prompt_tokens", "got 0, expected -1 or more than 0")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "got stream: false, expected stream: true")
    fields = {name: getattr(request, name) for name in _SAME if hasattr(request, name)}
    return fields | {"structured_outputs": _structured_outputs(request)}


def _structured_outputs(request: ApiRequest) -> StructuredOutputs | None:
    """Return the request's constraint on the text. Raises ApiError if its fields differ."""
    names = _structured_names(request)
    found = [_structured_output(name, request) for name in names]
    for name, other in zip(names, found, strict=True):
        if _meaning(other) != _meaning(found[0]):
            raise invalid(name, f"got {names[0]} with another value, too; send one of them")
    return found[0] if found else None


def _meaning(wanted: StructuredOutputs | None) -> object:
    """Return a comparable value, because a schema may be a map or its text."""
    if wanted is None or (wanted.json is None and not wanted.json_object):
        return wanted
    return msgspec.json.encode(wanted.schema(), order="sorted")


def _structured_output(name: str, request: ApiRequest) -> StructuredOutputs | None:
    """Return the constraint on the text in a field of a request. Raises ApiError."""
    if name == "structured_outputs":
        return request.structured_outputs
    if name != "response_format":
        return _structured(name, _KINDS[name], getattr(request, name))
    given = request.response_format
    if given and given.type == "json_object":
        return StructuredOutputs(json_object=True)
    schema = given and given.json_schema and given.json_schema.schema
    if schema is None:
        raise invalid(_SCHEMA, "got nothing, expected a JSON schema")
    return _structured(_SCHEMA, "json", schema)


def _structured_names(request: ApiRequest) -> list[str]:
    """Return the names of a request's fields that constrain the text."""
    names = [name for name in ("structured_outputs", *_KINDS) if getattr(request, name) is not None]
    given = request.response_format
    return [*names, "response_format"] if given and given.type != "text" else names


def _structured(path: str, kind: str, value: Any) -> StructuredOutputs:
    """Return `StructuredOutputs` of one kind. path: the request's field. Raises ApiError."""
    try:
        return msgspec.convert({kind: value}, StructuredOutputs)
    except msgspec.ValidationError as error:
        reason = str(error).partition(" - at ")[0].removeprefix(f"{kind}: ")
        if reason.startswith("Expected"):
            reason = f"got {value!r:.60}, e{reason[1:]}"
        raise invalid(path, reason) from error


def _tools_path(request: ChatRequest) -> str:
    """Return the path of the function's parameters in a grammar; `tools` for several functions."""
    forced = forced_tools(request)
    if len(forced) != 1:
        return "tools"
    return f"tools[{request.tools.index(forced[0])}].function.parameters"
