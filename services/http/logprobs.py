"""Logprobs in the shapes of chats, completions and vLLM's prompts."""

from penstock.protocol.logprobs import Logprob, TokenLogprobs
from penstock.services.http.replies import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)

Logprobs = list[TokenLogprobs | None] | None
"""of tokens in a row; None where a token's is not known, after a restart of the scheduler"""
_UNKNOWN = ChatLogprob(token="", logprob=-9999.0, bytes=None, top_logprobs=[])


def chat_logprobs(tokens: Logprobs) -> ChatLogprobs | None:
    """Of the tokens of a chat's answer."""
    if tokens is None:
        return None
    content = [
        ChatLogprob(
            token=one.token,
            logprob=one.logprob,
            bytes=one.bytes,
            top_logprobs=[_top(other) for other in one.top],
        )
        if one
        else _UNKNOWN
        for one in tokens
    ]
    return ChatLogprobs(content=content)


def _top(one: Logprob) -> TopLogprob:
    return TopLogprob(token=one.token, logprob=one.logprob, bytes=one.bytes)


def completion_logprobs(
    tokens: Logprobs, offset: int, first: str | None = None
) -> CompletionLogprobs | None:
    """Of the tokens of a text that begins `offset` characters behind the start of the choice's.

    first: the text of a token before them, of which nothing is known.
    """
    if tokens is None:
        return None
    rows: list[tuple[str, float | None, dict[str, float] | None]] = []
    if first is not None:
        rows.append((first, None, None))
    for one in tokens:
        if one is None:
            rows.append(("", None, None))
            continue
        top = {other.token: other.logprob for other in reversed([*one.top, one])}
        rows.append((one.token, one.logprob, top))
    offsets = []
    for token, *_ in rows:
        offsets.append(offset)
        offset += len(token)
    return CompletionLogprobs(
        text_offset=offsets,
        tokens=[token for token, _, _ in rows],
        token_logprobs=[logprob for _, logprob, _ in rows],
        top_logprobs=[top for _, _, top in rows],
    )


def first_token(prompt: str, tokens: list[TokenLogprobs | None]) -> str:
    """The text of a prompt's first token, of which there is no logprob: what the others leave."""
    length = sum(len(one.bytes) for one in tokens if one)
    text = prompt.encode()
    return text[: len(text) - length].decode(errors="replace")


def prompt_logprobs(tokens: list[TokenLogprobs | None]) -> PromptLogprobs:
    """vLLM's shape: by token id."""
    return [_by_id(one) if one else None for one in tokens]


def _by_id(one: TokenLogprobs) -> dict[str, PromptLogprob]:
    ranks: dict[int, int] = {other.token_id: rank for rank, other in enumerate(one.top, 1)}
    return {
        str(other.token_id): PromptLogprob(
            logprob=other.logprob, rank=ranks.get(other.token_id), decoded_token=other.token
        )
        for other in (one, *one.top)
    }
