"""Texts with reasoning, as tokens and as the deltas of a detokenizer."""

import re
from typing import Any

from penstock.protocol.messages.client import FinishReason, GenerateReply, TextDelta, Usage
from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.pipeline import StreamOpened
from penstock.services.detokenizer.text_stream import TextStream
from tests.services.test_detokenizer import TABLE

THINK, END_THINK = TABLE.reasoning.begin, TABLE.reasoning.end


def span(text: str, starts_thinking: bool = False) -> dict[str, Any]:
    """Return the fields of messages with this text, or with a piece of it."""
    opened = re.match("<think>" if starts_thinking else r"\s*<think>", text)
    if not (opened or starts_thinking):
        return {}
    begin = opened.end() if opened else 0
    end = text.find("</think>", begin)
    return {"reasoning_begin": begin, "reasoning_end": None if end < 0 else end}


def tokens(*parts: str | int) -> list[int]:
    """Return token ids of texts, whose tags are only spelled, and of tokens."""
    return [
        token for part in parts for token in ([part] if isinstance(part, int) else part.encode())
    ]


def tagged(text: str) -> list[int]:
    """Return token ids of a text in which each tag is a token."""
    tags = {"<think>": THINK, "</think>": END_THINK}
    return tokens(*(tags.get(part, part) for part in re.split("(</?think>)", text)))


def opened(output: list[int] | None = None, **fields: Any) -> StreamOpened:
    """Return the stream of a chat."""
    return StreamOpened(
        stream_id=1,
        request_id="r",
        attempt=0,
        prompt_tail=b"",
        output_token_ids=pack(output or []),
        is_chat=True,
        **fields,
    )


def deltas(batches: list[list[int]], **fields: Any) -> list[TextDelta]:
    """Return the deltas of a chat whose tokens come in batches, up to a stop string."""
    stream = TextStream(opened(**fields), TABLE)
    found = []
    for batch in batches:
        found.append(stream.feed(batch))
        if stream.stopped:
            return found
    return [*found, stream.end("stop")]


def reply(text: str, finish_reason: FinishReason = "stop", **fields: Any) -> GenerateReply:
    """Return the reply with a text, in which tags are tokens."""
    usage = Usage(prompt_tokens=1, cached_tokens=0, output_tokens=1)
    fields = {"token_ids": [], "usage": usage, **span(text)} | fields
    return GenerateReply(request_id="r", text=text, finish_reason=finish_reason, **fields)


def delta(text: str, of: str = "", **fields: Any) -> TextDelta:
    """Return a piece; of: the text that it is a piece of."""
    fields = {"token_offset": 0, "char_offset": 0, "token_ids": [1], **span(of or text)} | fields
    return TextDelta(request_id="r", text=text, **fields)
