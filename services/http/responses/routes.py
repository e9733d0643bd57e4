"""`/v1/responses`."""

import time
import uuid

from starlette.responses import Response
from starlette.types import Receive

from penstock.services.http.access import caller
from penstock.services.http.app_state import AppState
from penstock.services.http.chat import ChatChoice, submit_chat
from penstock.services.http.replies import json_response
from penstock.services.http.responses.events import ResponseEvents
from penstock.services.http.responses.replies import ReasoningUsed, ResponseReply, TextUsed
from penstock.services.http.responses.schema import ResponsesRequest, TextFormat
from penstock.services.http.responses.to_chat_request import (
    chat_request,
    input_items,
    name_in_responses,
)


async def respond(state: AppState, request: ResponsesRequest, receive: Receive) -> Response:
    """Answer items. Raises ApiError, RequestError, ClientDisconnect."""
    state.generation_config.fill(request)
    request.request_id = request.request_id or caller.get().request_id or None
    chat = chat_request(request, input_items(request))
    generation = submit_chat(state, "resp", chat, name_in_responses)
    choice = ChatChoice(0, chat, state.tool_format)
    events = ResponseEvents(begun(request, state.model), choice, state.end_of_thought)
    if request.stream:
        return generation.stream_events(events)
    (reply,) = await generation.replies(receive)
    return json_response(events.whole(reply))


def begun(request: ResponsesRequest, model: str) -> ResponseReply:
    """Return a response without output."""
    same = (set(ResponseReply.__struct_fields__) & set(request.__struct_fields__)) - _OWN
    reasoning, text = request.reasoning, request.text
    return ResponseReply(
        **{name: getattr(request, name) for name in same},
        id=f"resp_{uuid.uuid4().hex}",
        created_at=int(time.time()),
        model=model,
        reasoning=ReasoningUsed(
            effort=reasoning.effort if reasoning else None,
            summary=reasoning.summary if reasoning else None,
        ),
        store=bool(request.store),
        text=TextUsed(
            format=text.format or TextFormat(type="text"), verbosity=text.verbosity or "medium"
        ),
        top_logprobs=request.top_logprobs or 0,
    )


_OWN = {"model", "reasoning", "service_tier", "store", "text", "top_logprobs"}
"""fields that a response has even where its request lacks them"""
