"""`/v1/messages`, `/v1/messages/count_tokens`, and the list of models in Anthropic's shape."""

from datetime import UTC, datetime
from functools import partial
from typing import Any

from starlette.responses import Response

from penstock.services.http.generation.chat import count_prompt_tokens, submit_chat
from penstock.services.http.generation.replies import Model, ModelList
from penstock.services.http.messages.events import MessageEvents
from penstock.services.http.messages.schema import CountTokensRequest, MessagesRequest, TokenCount
from penstock.services.http.messages.to_chat_request import chat_request, name_in_messages
from penstock.services.http.shared.access import caller
from penstock.services.http.shared.app_state import AppState
from penstock.services.http.shared.json_response import json_response


async def answer_messages(state: AppState, request: MessagesRequest) -> Response:
    """Answer a conversation in Anthropic's form."""
    chat = chat_request(request, state.max_model_len)
    chat.request_id = caller.get().request_id or None
    generation = submit_chat(state, "msg", chat, partial(name_in_messages, request))
    message_id = f"msg_{caller.get().unique_id}"
    model, form = generation.head["model"], state.tool_format
    events = MessageEvents(message_id, model, chat, form, state.cached_block)
    if request.stream:
        return generation.stream_events(events)
    (reply,) = await generation.replies()
    return json_response(events.whole(reply))


async def count_tokens(state: AppState, request: CountTokensRequest) -> Response:
    """Return the length of the prompt of such a conversation."""
    chat = chat_request(request, state.max_model_len)
    number = await count_prompt_tokens(state, chat, partial(name_in_messages, request))
    return json_response(TokenCount(input_tokens=number))


def model_info(model: Model) -> dict[str, Any]:
    """Return a model as Anthropic describes it."""
    return {
        "type": "model",
        "id": model.id,
        "display_name": model.id,
        "created_at": datetime.fromtimestamp(model.created, UTC),
        "lifecycle": "active",
        "max_input_tokens": model.max_model_len,
        "max_tokens": model.max_model_len,
    }


def model_page(models: ModelList) -> dict[str, Any]:
    """Return all models as one page."""
    ids = [one.id for one in models.data]
    data = [model_info(one) for one in models.data]
    return {"data": data, "first_id": ids[0], "last_id": ids[-1], "has_more": False}
