"""What is refused of a request that gateway and tokenizer have let through."""

from penstock.services.scheduler.sequence import Sequence

MAX_PROMPT_LOGPROBS = 1 << 19
"""of one prompt. They are told at once: for so many a detokenizer takes a second, in which it says
nothing else; after five it would be given up, and the next one too"""


class CannotFitError(ValueError):
    """A request that could not run even alone; the message names the numbers."""


def limit_length(sequence: Sequence, max_length: int) -> None:
    """Sets the length at which a sequence ends. Raises CannotFitError."""
    if sequence.num_prompt_tokens >= max_length:
        raise CannotFitError(
            f"prompt has {sequence.num_prompt_tokens} tokens; at most {max_length - 1} "
            "fit into the context and the KV pool"
        )
    wanted = sequence.sampling.max_tokens or max_length
    sequence.max_length = min(sequence.num_prompt_tokens + wanted, max_length)


def check_request(sequence: Sequence, vocab_size: int) -> None:
    """Raises CannotFitError."""
    for extreme in (min(sequence.token_ids), max(sequence.token_ids)):
        if not 0 <= extreme < vocab_size:  # every worker, and the next one, would end
            raise CannotFitError(f"prompt has token id {extreme}; ids go up to {vocab_size - 1}")
    sampling = sequence.sampling
    named = {
        "logit_bias": sampling.logit_bias,
        "allowed_token_ids": sampling.allowed_token_ids or (),
    }
    for field, token_ids in named.items():
        if (largest := max(token_ids, default=0)) >= vocab_size:
            raise CannotFitError(f"{field} has token id {largest}; ids go up to {vocab_size - 1}")
    num_top = sequence.sampling.prompt_logprobs
    if num_top is not None and (1 + num_top) * sequence.num_prompt_tokens > MAX_PROMPT_LOGPROBS:
        raise CannotFitError(
            f"prompt_logprobs is {num_top} and the prompt has {sequence.num_prompt_tokens} tokens; "
            f"at most {MAX_PROMPT_LOGPROBS} logprobs of a prompt are told"
        )
