"""`/v1/responses/{response_id}/input_items` and `/v1/responses/input_tokens`."""

from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from starlette.responses import Response

from penstock.protocol.field_errors import explain
from penstock.services.http.app_state import AppState, Models
from penstock.services.http.chat import count_prompt_tokens
from penstock.services.http.errors import ApiError, invalid
from penstock.services.http.replies import json_response
from penstock.services.http.responses.replies import InputItems, InputTokens
from penstock.services.http.responses.schema import InputItemsQuery, InputTokensRequest, Item
from penstock.services.http.responses.to_chat_request import (
    chat_request,
    input_items,
    name_in_responses,
)

Query = TypeVar("Query", bound=Struct)


def decode_query(given: dict[str, str], kind: type[Query]) -> Query:
    """Decode parameters of a path and its query; unknown ones change nothing. Raises ApiError."""
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        path, message = explain(str(error), given, kind)
        raise ApiError(400, message, path) from None


async def list_input_items(models: Models, given: dict[str, str]) -> Response:
    """List the input of a stored response, with that of the responses before it.

    given: the fields of InputItemsQuery, and others, which change nothing.
    """
    query = decode_query(given, InputItemsQuery)
    found = models.responses.input_items(query.response_id)
    suffix = query.response_id.partition("_")[2]
    items = [_listed(one, f"item_{suffix}_{number}") for number, one in enumerate(found)]
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
    store, previous_id = state.responses, request.previous_response_id
    items = store.items(previous_id) if previous_id else []
    items += store.resolved(input_items(request))
    if not items and request.instructions is None:
        raise invalid("input", "got nothing, expected a text or items")
    chat = chat_request(request, items)
    number = await count_prompt_tokens(state, chat, name_in_responses)
    return json_response(InputTokens(input_tokens=number))


def _listed(item: Item, name: str) -> dict[str, Any]:
    """Return an item as OpenAI lists it. name: its id, if the client gave it none."""
    listed = {"id": name, "type": item.type, "status": "completed", **msgspec.to_builtins(item)}
    if isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        listed["content"] = [{"type": kind, "text": item.content}]
    for part in listed.get("content", []):
        if part["type"] == "output_text":
            part["annotations"] = []
    return listed
