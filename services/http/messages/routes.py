"""`/v1/messages` and `/v1/messages/count_tokens`."""

from starlette.responses import Response

from penstock.services.http.access import caller
from penstock.services.http.app_state import AppState
from penstock.services.http.chat import count_prompt_tokens, submit_chat
from penstock.services.http.messages.events import MessageEvents
from penstock.services.http.messages.replies import TokenCount
from penstock.services.http.messages.schema import CountTokensRequest, MessagesRequest
from penstock.services.http.messages.to_chat_request import chat_request, name_in_messages
from penstock.services.http.replies import json_response


async def answer_messages(state: AppState, request: MessagesRequest) -> Response:
    """Answer a conversation in Anthropic's form."""
    chat = chat_request(request, state.max_model_len)
    chat.request_id = caller.get().request_id or None
    generation = submit_chat(state, "msg", chat, name_in_messages)
    message_id = f"msg_{caller.get().unique_id}"
    events = MessageEvents(message_id, generation.head["model"], chat, state.tool_format)
    if request.stream:
        return generation.stream_events(events)
    (reply,) = await generation.replies()
    return json_response(events.whole(reply))


async def count_tokens(state: AppState, request: CountTokensRequest) -> Response:
    """Return the length of the prompt of such a conversation."""
    chat = chat_request(request, state.max_model_len)
    number = await count_prompt_tokens(state, chat, name_in_messages)
    return json_response(TokenCount(input_tokens=number))
