"""Logprobs in the shapes of chats, completions and vLLM's prompts."""

from itertools import accumulate

from penstock.protocol.messages.logprobs import Logprob, TokenLogprobs
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


def chat_logprobs(tokens: Logprobs, names_ids: bool = False) -> ChatLogprobs | None:
    """Of the tokens of a chat's answer. names_ids: as in `_name`."""
    if tokens is None:
        return None
    content = [
        ChatLogprob(
            token=_name(one, names_ids),
            logprob=one.logprob,
            bytes=one.bytes,
            top_logprobs=[_top(other, names_ids) for other in one.top],
        )
        if one
        else _UNKNOWN
        for one in tokens
    ]
    return ChatLogprobs(content=content)


def _name(one: Logprob, names_ids: bool) -> str:
    """A token's text, or, with names_ids, `token_id:N`, which is another one for each token."""
    return f"token_id:{one.token_id}" if names_ids else one.token


def _top(one: Logprob, names_ids: bool) -> TopLogprob:
    return TopLogprob(token=_name(one, names_ids), logprob=one.logprob, bytes=one.bytes)


def completion_logprobs(
    tokens: Logprobs, offset: int, first: str | None = None, names_ids: bool = False
) -> CompletionLogprobs | None:
    """Of the tokens of a text that begins `offset` characters behind the start of the choice's.

    first: the text of a token before them, of which nothing is known. names_ids: as in `_name`.
    """
    if tokens is None:
        return None
    rows: list[tuple[str, float | None, dict[str, float] | None]] = []
    lengths: list[int] = []
    if first is not None:
        rows.append((first, None, None))
        lengths.append(len(first))
    for one in tokens:
        lengths.append(len(one.token) if one else 0)
        if one is None:
            rows.append(("", None, None))
            continue
        both = reversed([*one.top, one])
        top = {_name(other, names_ids): other.logprob for other in both}
        rows.append((_name(one, names_ids), one.logprob, top))
    return CompletionLogprobs(
        text_offset=list(accumulate(lengths[:-1], initial=offset)) if rows else [],
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
