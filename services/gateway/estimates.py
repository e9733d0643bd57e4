"""Sizes of requests that are estimated, for the limits of the ledger."""

from penstock.protocol.messages.client import GenerateRequest, TokenizePromptRequest

TOKEN_BYTES = 8
"""that a token id counts for, in memory and on its way"""
TEXT_BYTES = 4
"""of text for each token, until a tokenizer has counted them"""
_LOGPROB_BYTES = 256
"""that one `Logprob` counts for: four objects and their struct"""


def logprob_bytes(num_likeliest: int | None) -> int:
    """Bytes that the logprobs of one token count for."""
    return 0 if num_likeliest is None else _LOGPROB_BYTES * (1 + num_likeliest)


def estimated_tokens(request: GenerateRequest | TokenizePromptRequest) -> int:
    """Tokens of a prompt that no tokenizer has seen: exact for token ids, else bytes / 4."""
    if isinstance(request.prompt, list):
        return len(request.prompt)
    texts = [message.content for message in request.messages or []]
    return max(1, sum(len(text.encode()) for text in [request.prompt or "", *texts]) // TEXT_BYTES)
