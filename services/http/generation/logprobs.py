"""Logprobs in the shapes of chats, completions and vLLM's prompts."""

from codecs import getincrementaldecoder

from penstock.protocol.messages.client import Logprob, TokenLogprobs
from penstock.services.http.generation.replies import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)

# of consecutive tokens; None for a token whose logprob was lost with a scheduler
Logprobs = list[TokenLogprobs | None] | None
_UNKNOWN = ChatLogprob(token="", logprob=-9999.0, bytes=None, top_logprobs=[])


def chat_logprobs(tokens: Logprobs, names_ids: bool = False) -> ChatLogprobs | None:
    """Return the logprobs of a chat's answer. names_ids: as in `_name`."""
    if tokens is None:
        return None
    content = [
        ChatLogprob(
            token=_name(one, names_ids),
            logprob=one.logprob,
            bytes=one.bytes,
            top_logprobs=[
                TopLogprob(token=_name(top, names_ids), logprob=top.logprob, bytes=top.bytes)
                for top in one.top
            ],
        )
        if one
        else _UNKNOWN
        for one in tokens
    ]
    return ChatLogprobs(content=content)


def completion_logprobs(
    tokens: Logprobs, num_echoed: int = 0, names_ids: bool = False
) -> CompletionLogprobs | None:
    """Return the logprobs of a completion's output.

    num_echoed: characters of the prompt before it. names_ids: as in `_name`.
    """
    if tokens is None:
        return None
    logprobs = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    text_offset = num_echoed
    for one in tokens:
        if one and one.text_offset is not None:
            text_offset = num_echoed + one.text_offset
        _append(logprobs, text_offset, one, names_ids)
    return logprobs


def echoed_logprobs(
    prompt: str, tokens: list[TokenLogprobs | None], names_ids: bool = False
) -> CompletionLogprobs:
    """Return the logprobs of an echoed prompt. Its first token has none.

    The text of the first token is what the other tokens leave of the prompt.
    """
    data, decoder = prompt.encode(), getincrementaldecoder("utf-8")("replace")
    first = data[: len(data) - sum(len(one.bytes) for one in tokens if one)]
    name, text_offset = first.decode(errors="replace"), len(decoder.decode(first))
    logprobs = CompletionLogprobs(
        text_offset=[0], token_logprobs=[None], tokens=[name], top_logprobs=[None]
    )
    for one in tokens[1:]:
        _append(logprobs, text_offset, one, names_ids)
        text_offset += len(decoder.decode(bytes(one.bytes))) if one else 0
    return logprobs


def prompt_logprobs(tokens: list[TokenLogprobs | None]) -> PromptLogprobs:
    """Return logprobs in vLLM's shape, by token id."""
    return [_by_id(one) if one else None for one in tokens]


def _by_id(one: TokenLogprobs) -> dict[str, PromptLogprob]:
    return {
        str(other.token_id): PromptLogprob(
            logprob=other.logprob, rank=other.rank, decoded_token=other.token
        )
        for other in (one, *one.top)
    }


def _append(
    logprobs: CompletionLogprobs, text_offset: int, one: TokenLogprobs | None, names_ids: bool
) -> None:
    both = [one, *reversed(one.top)] if one else []  # of two equal names the likelier one wins
    top = {_unique_name(other, names_ids): other.logprob for other in both}
    logprobs.text_offset.append(text_offset)
    logprobs.tokens.append(_unique_name(one, names_ids) if one else "")
    logprobs.token_logprobs.append(one.logprob if one else None)
    logprobs.top_logprobs.append(top or None)


def _name(one: Logprob, names_ids: bool) -> str:
    """Return a token's text, or, with names_ids, `token_id:N`, which is unique."""
    return f"token_id:{one.token_id}" if names_ids else one.token


def _unique_name(one: Logprob, names_ids: bool) -> str:
    """Return a token's text; as OpenAI does, `bytes:\\xe2\\x82` for a part of a character."""
    if names_ids or "\ufffd" not in one.token:
        return _name(one, names_ids)
    data = bytes(one.bytes)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
