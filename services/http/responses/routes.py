"""`/v1/responses`, and its stored responses."""

import time
import uuid
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from starlette.responses import Response

from penstock.protocol.decoding import explain
from penstock.services.http.generation.chat import ChatChoice, count_prompt_tokens, submit_chat
from penstock.services.http.responses.events import ResponseEvents
from penstock.services.http.responses.replies import (
    DeletedResponse,
    InputItems,
    InputTokens,
    ResponseReply,
    TextUsed,
)
from penstock.services.http.responses.schema import (
    InputItemsQuery,
    InputTokensRequest,
    Item,
    Reasoning,
    ResponsesRequest,
    RetrieveQuery,
    TextFormat,
)
from penstock.services.http.responses.store import ResponseStore
from penstock.services.http.responses.to_chat_request import (
    chat_request,
    input_items,
    name_in_responses,
)
from penstock.services.http.responses.tools import OfferedTools, offer
from penstock.services.http.shared.access import caller
from penstock.services.http.shared.app_state import AppState, Models
from penstock.services.http.shared.errors import ApiError, invalid
from penstock.services.http.shared.json_response import json_response

# fields that a response has even where its request lacks them
_OWN = {"model", "reasoning", "service_tier", "text", "tools", "top_logprobs"}
Query = TypeVar("Query", bound=Struct)


async def respond(state: AppState, request: ResponsesRequest) -> Response:
    """Answer the items of a conversation."""
    state.generation_config.fill(request)
    request.request_id = request.request_id or caller.get().request_id or None
    store = state.singletons.get(ResponseStore)
    items, tools = conversation(store, request), offer(request.tools)
    chat = chat_request(request, items, tools)
    generation = submit_chat(state, "resp", chat, partial(name_in_responses, tools))
    choice = ChatChoice(0, chat, state.tool_format)

    def keep(response: ResponseReply) -> None:
        response.store = response.store and store.put(response, items)

    events = ResponseEvents(
        begun(request, tools, state.model), choice, tools.names, state.end_of_thought, keep
    )
    if request.stream:
        return generation.stream_events(events)
    (reply,) = await generation.replies()
    return json_response(events.whole(reply))


def conversation(store: ResponseStore, request: ResponsesRequest) -> list[Item]:
    """Return the items of the previous response, then those of the input. Raises ApiError."""
    name = request.previous_response_id
    return [*(store.items(name) if name else []), *store.resolved(input_items(request))]


async def retrieve(models: Models, given: dict[str, str]) -> Response:
    """Return a stored response. given: the fields of RetrieveQuery."""
    query = _decode_query(given, RetrieveQuery)
    if query.stream:
        raise invalid("stream", "got true, expected false: events are not kept")
    body = models.singletons.get(ResponseStore).body(query.response_id)
    return Response(body, media_type="application/json")


async def delete(models: Models, path: dict[str, str]) -> Response:
    """Forget a stored response."""
    models.singletons.get(ResponseStore).remove(path["response_id"])
    return json_response(DeletedResponse(id=path["response_id"]))


async def list_input_items(models: Models, given: dict[str, str]) -> Response:
    """List the input of a stored response, with that of the responses before it.

    given: the fields of InputItemsQuery, and others, which change nothing.
    """
    query = _decode_query(given, InputItemsQuery)
    found = models.singletons.get(ResponseStore).input_items(query.response_id)
    suffix = query.response_id.partition("_")[2]
    items = [listed(one, f"item_{suffix}_{number}") for number, one in enumerate(found)]
    if query.order == "desc":
        items.reverse()
    if query.after is not None:
        places = [number for number, one in enumerate(items) if one["id"] == query.after]
        if not places:
            raise invalid("after", f"got {query.after!r:.200}, expected the id of an input item")
        items = items[places[0] + 1 :]
    page = items[: query.limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    has_more = len(items) > len(page)
    return json_response(InputItems(data=page, first_id=first, last_id=last, has_more=has_more))


async def count_input_tokens(state: AppState, request: InputTokensRequest) -> Response:
    """Return the length of the prompt that a response would have."""
    items = conversation(state.singletons.get(ResponseStore), request)
    if not items and request.instructions is None:
        raise invalid("input", "got nothing, expected a text or items")
    tools = offer(request.tools)
    chat = chat_request(request, items, tools)
    number = await count_prompt_tokens(state, chat, partial(name_in_responses, tools))
    return json_response(InputTokens(input_tokens=number))


def begun(request: ResponsesRequest, tools: OfferedTools, model: str) -> ResponseReply:
    """Return a response without output."""
    same = (set(ResponseReply.__struct_fields__) & set(request.__struct_fields__)) - _OWN
    text = request.text
    return ResponseReply(
        **{name: getattr(request, name) for name in same},
        id=f"resp_{uuid.uuid4().hex}",
        created_at=int(time.time()),
        model=model,
        tools=tools.kept,
        reasoning=request.reasoning or Reasoning(),
        text=TextUsed(
            format=text.format or TextFormat(type="text"), verbosity=text.verbosity or "medium"
        ),
        top_logprobs=request.top_logprobs or 0,
    )


def _decode_query(given: dict[str, str], kind: type[Query]) -> Query:
    """Decode parameters of a path and its query; unknown ones change nothing. Raises ApiError."""
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        path, message = explain(str(error), given, kind)
        raise ApiError(400, message, path) from None


def listed(item: Item, name: str) -> dict[str, Any]:
    """Return an item as OpenAI lists it. name: its id, if the client gave it none."""
    listed = {"id": name, "type": item.type, "status": "completed", **msgspec.to_builtins(item)}
    if isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        listed["content"] = [{"type": kind, "text": item.content}]
    for part in listed.get("content", []):
        if part["type"] == "output_text":
            part["annotations"] = []
    return listed
