"""`/v1/responses/compact`: a conversation as the messages that were sent, and a summary."""

import uuid

from starlette.responses import Response

from penstock.services.http.responses.replies import (
    CompactedResponse,
    OutputMessage,
    ResponseReply,
)
from penstock.services.http.responses.routes import listed, submit
from penstock.services.http.responses.schema import (
    CompactRequest,
    Item,
    Reasoning,
    ResponsesRequest,
)
from penstock.services.http.responses.to_chat_request import SUMMARY, input_items
from penstock.services.http.shared.app_state import AppState
from penstock.services.http.shared.errors import ApiError, invalid
from penstock.services.http.shared.json_response import json_response

_TASK = (
    "Summarize this conversation so that it can be continued from your summary. Keep facts, "
    "decisions, results of tools, and open tasks. The messages of the user are kept: do not repeat "
    "them. Reply with the summary alone."
)
_SUMMARY_SHARE = 1 / 4
"""maximum length of a summary, as a share of the context"""


async def compact(state: AppState, request: CompactRequest) -> Response:
    """Replace the answers and calls of a conversation by a summary."""
    if not request.input and request.previous_response_id is None:
        raise invalid("input", "got nothing, expected a text or items")
    limit = max(1, int(state.max_model_len * _SUMMARY_SHARE))
    asked = ResponsesRequest(
        input=[*input_items(request), Item(role="user", content=_TASK)],
        previous_response_id=request.previous_response_id,
        instructions=request.instructions,
        min_tokens=1,
        max_output_tokens=limit,
        reasoning=Reasoning(effort="none"),
        store=False,
    )
    generation, events, items = submit(state, asked)
    (reply,) = await generation.replies()
    usage = reply.usage
    if reply.finish_reason == "length" and usage.output_tokens < limit:
        fits = usage.prompt_tokens, state.max_model_len - limit
        problem = f"got {fits[0]} tokens with the task, expected up to {fits[1]}, so that a summary"
        raise ApiError(400, f"input: {problem} of {limit} tokens fits", "input", too_long=fits)
    return json_response(_compacted(events.whole(reply), items[:-1]))


def _compacted(response: ResponseReply, items: list[Item]) -> CompactedResponse:
    """Return a conversation with the text of a response as its summary. Raises ApiError."""
    parts = [
        part for one in response.output if isinstance(one, OutputMessage) for part in one.content
    ]
    summary = "".join(part.text for part in parts)
    if not summary.strip():
        raise ApiError(500, "the model wrote an empty summary; keep the conversation as it is")
    name = uuid.uuid4().hex
    messages = [one for one in items if one.type == "message" and one.role != "assistant"]
    kept = [listed(one, f"item_{name}_{number}") for number, one in enumerate(messages)]
    content = SUMMARY + summary
    compaction = {"type": "compaction", "id": f"cmp_{name}", "encrypted_content": content}
    return CompactedResponse(
        id=response.id,
        created_at=response.created_at,
        output=[*kept, compaction],
        usage=response.usage,
    )
