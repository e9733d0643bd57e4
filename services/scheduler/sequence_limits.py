"""Limits of a sequence that gateway and tokenizer can't check."""

from collections.abc import Sequence

from penstock.protocol.messages.client import ErrorReply
from penstock.protocol.messages.sampling import Pooling, SamplingParams

MAX_PROMPT_LOGPROBS = 1 << 19
"""of one prompt. They are sent at once: for this number a detokenizer takes a second, in which it
handles nothing else; after five seconds it would be given up, and the next one too"""


class CannotFitError(ValueError):
    """A request that could not run even alone; the message names the numbers."""

    @property
    def reply(self) -> ErrorReply:
        message = str(self)
        return ErrorReply(code="invalid", message=message, field=message.partition(":")[0])


def check_limits(
    token_ids: Sequence[int],
    num_prompt_tokens: int,
    sampling: SamplingParams,
    pooling: Pooling | None,
    vocab_size: int,
) -> None:
    """Raise CannotFitError for a token id that the model lacks, and for too many logprobs."""
    if not num_prompt_tokens:
        raise CannotFitError("prompt: got no token, expected one or more")
    for extreme in (min(token_ids), max(token_ids)):
        if not 0 <= extreme < vocab_size:  # every worker, and its successor, would exit
            raise CannotFitError(f"prompt: got token id {extreme}, expected up to {vocab_size - 1}")
    named = {
        "logit_bias": sampling.logit_bias,
        "allowed_token_ids": sampling.allowed_token_ids or (),
        "pooling.label_ids": pooling.label_ids if pooling else (),
    }
    for name, ids in named.items():
        if (largest := max(ids, default=0)) >= vocab_size:
            raise CannotFitError(f"{name}: got token id {largest}, expected up to {vocab_size - 1}")
    num_top = sampling.prompt_logprobs
    if num_top is not None and (1 + num_top) * num_prompt_tokens > MAX_PROMPT_LOGPROBS:
        raise CannotFitError(
            f"prompt_logprobs: got {num_top} for a prompt of {num_prompt_tokens} tokens, "
            f"expected up to {MAX_PROMPT_LOGPROBS} logprobs in total"
        )
