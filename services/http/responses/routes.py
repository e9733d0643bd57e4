"""`/v1/responses`, and its stored responses."""

import asyncio
import time
import uuid
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from starlette.responses import Response

from penstock.protocol.client.errors import RequestError
from penstock.protocol.field_errors import explain
from penstock.services.http.generation.chat import ChatChoice, count_prompt_tokens, submit_chat
from penstock.services.http.generation.generation import Generation
from penstock.services.http.responses.event_log import EventLog
from penstock.services.http.responses.events import Event, ResponseEvents
from penstock.services.http.responses.replies import (
    DeletedResponse,
    InputItems,
    InputTokens,
    ResponseError,
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
from penstock.services.http.shared.access import caller
from penstock.services.http.shared.app_state import AppState, Models
from penstock.services.http.shared.errors import ApiError, as_api_error, invalid
from penstock.services.http.shared.json_response import json_response

_OWN = {"model", "reasoning", "service_tier", "store", "text", "top_logprobs"}
"""fields that a response has even where its request lacks them"""
Query = TypeVar("Query", bound=Struct)


class Submitted(NamedTuple):
    """A response whose generation was submitted."""

    generation: Generation
    events: ResponseEvents
    items: list[Item]
    """the conversation: that of the previous response, then the input"""


async def respond(state: AppState, request: ResponsesRequest) -> Response:
    """Answer the items of a conversation."""
    if request.background and not request.store:
        raise invalid("background", "got true, expected store: true with it")
    log = EventLog() if request.background and request.stream else None
    generation, events, items = submit(state, request, log)
    if request.background:
        store = state.singletons.get(ResponseStore)
        with generation.aborted_on_error():
            store.put(events.response, items, log)
        store.run(events.response.id, _run(generation, events, log))
        return log.follow(0) if log else json_response(events.response)
    if request.stream:
        return generation.stream_events(events)
    (reply,) = await generation.replies()
    return json_response(events.whole(reply))


def submit(state: AppState, request: ResponsesRequest, log: EventLog | None = None) -> Submitted:
    """Submit a request. Raises ApiError, MessageError.

    log: the events of a stream in the background.
    """
    state.generation_config.fill(request)
    request.request_id = request.request_id or caller.get().request_id or None
    store = state.singletons.get(ResponseStore)
    items = conversation(store, request)
    chat = chat_request(request, items)
    generation = submit_chat(state, "resp", chat, name_in_responses)
    choice = ChatChoice(0, chat, state.tool_format)

    def keep(response: ResponseReply) -> None:
        if request.store is False:
            return
        try:
            store.put(response, items, log)
        except ApiError as error:
            response.store = False
            if request.background:
                store.put(_failed(response, error), items)

    events = ResponseEvents(begun(request, state.model), choice, state.end_of_thought, keep)
    return Submitted(generation, events, items)


def conversation(store: ResponseStore, request: ResponsesRequest) -> list[Item]:
    """Return the items of the previous response, then those of the input. Raises ApiError."""
    name = request.previous_response_id
    return [*(store.items(name) if name else []), *store.resolved(input_items(request))]


async def retrieve(models: Models, given: dict[str, str]) -> Response:
    """Return a stored response, or the events of one in the background.

    given: the fields of RetrieveQuery.
    """
    query, store = _decode_query(given, RetrieveQuery), models.singletons.get(ResponseStore)
    if query.stream:
        after = -1 if query.starting_after is None else query.starting_after
        return store.log(query.response_id).follow(after + 1)
    if query.starting_after is not None:
        raise invalid("starting_after", f"got {query.starting_after}, expected stream=true with it")
    return Response(store.body(query.response_id), media_type="application/json")


async def delete(models: Models, path: dict[str, str]) -> Response:
    """Forget a stored response."""
    await models.singletons.get(ResponseStore).remove(path["response_id"])
    return json_response(DeletedResponse(id=path["response_id"]))


async def cancel(models: Models, path: dict[str, str]) -> Response:
    """End the generation of a response in the background."""
    await models.singletons.get(ResponseStore).cancel(path["response_id"])
    return await retrieve(models, {"response_id": path["response_id"]})


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
    chat = chat_request(request, items)
    number = await count_prompt_tokens(state, chat, name_in_responses)
    return json_response(InputTokens(input_tokens=number))


def begun(request: ResponsesRequest, model: str) -> ResponseReply:
    """Return a response without output."""
    same = (set(ResponseReply.__struct_fields__) & set(request.__struct_fields__)) - _OWN
    text = request.text
    return ResponseReply(
        **{name: getattr(request, name) for name in same},
        id=f"resp_{uuid.uuid4().hex}",
        created_at=int(time.time()),
        model=model,
        reasoning=request.reasoning or Reasoning(),
        store=bool(request.store),
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


def _failed(response: ResponseReply, error: ApiError) -> ResponseReply:
    """Return a response whose output has no place in the store."""
    detail = ResponseError(code="server_error", message=str(error))
    return replace(response, status="failed", store=True, output=[], error=detail)


async def _run(generation: Generation, events: ResponseEvents, log: EventLog | None) -> None:
    """Complete a response without a client that waits for it.

    log: takes its events; None: it is not streamed.
    """
    last: Iterable[Event] = ()
    try:
        if log:
            log.write(events.begin())
            await generation.send_events(events, log)
        else:
            (reply,) = await generation.replies()
            events.whole(reply)
    except asyncio.CancelledError:
        last = events.cancel()
        raise
    except Exception as error:
        last = events.failed(as_api_error(error))
        if not isinstance(error, (RequestError, ApiError)):
            raise
    finally:
        found = list(last)
        if log:
            await log.send(found, is_last=True)
