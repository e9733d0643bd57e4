"""The span of a whole request, around the spans of the other processes."""

from penstock.protocol.messages.client import ErrorReply, GenerateReply
from penstock.protocol.tracing import Tracer
from penstock.services.gateway.entry import Entry


def trace_request(tracer: Tracer, entry: Entry, reply: GenerateReply | ErrorReply) -> None:
    """Writes the span of a request that has ended."""
    tracer.span(
        "request",
        entry.request_id,
        entry.accepted_at,
        {
            "gen_ai.usage.input_tokens": entry.num_prompt_tokens,
            "gen_ai.usage.output_tokens": len(entry.token_ids),
            "gen_ai.response.finish_reasons": [getattr(reply, "finish_reason", "error")],
            "penstock.cached_tokens": entry.num_cached_tokens,
            "penstock.num_attempts": entry.num_attempts,
        },
        events={"first token": entry.first_token_at} if entry.first_token_at else {},
        error=getattr(reply, "message", ""),
        is_root=True,
    )
