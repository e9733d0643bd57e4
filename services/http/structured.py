"""What an answer must match: the fields that say it, and their names in errors."""

from typing import Any

import msgspec

from penstock.protocol.client.errors import RequestError
from penstock.protocol.messages.structured import StructuredOutputs
from penstock.services.http.errors import ApiError
from penstock.services.http.schema import ApiRequest, ChatRequest
from penstock.services.http.tool_choice import forced_call, forced_tools, is_forced

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


def rename_field(error: RequestError, request: ApiRequest) -> None:
    """Names the field of an error as the client sent it."""
    ours, theirs = error.field, error.field
    if ours == "structured_outputs":
        theirs = _path(request)
    elif ours == "max_tokens" and getattr(request, "max_completion_tokens", None) is not None:
        theirs = "max_completion_tokens"
    if ours and theirs != ours:
        error.message = error.message.replace(ours, theirs, 1)  # type: ignore[arg-type]
        error.field = theirs


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
