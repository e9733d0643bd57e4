"""Inputs and outputs of `LLM`, with the shapes of vLLM's."""

import time
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from penstock.protocol.messages.client import (
    FinishReason,
    GenerateReply,
    GenerateRequest,
    Logprob,
    StopReason,
    TokenLogprobs,
)
from penstock.protocol.messages.sampling import SamplingParams

# token id → logprob, for the token at a position and the likeliest tokens
ByToken = dict[int, Logprob | TokenLogprobs]
PROMPT_KEYS = ("prompt", "prompt_token_ids")


class CompletionOutput(Struct, kw_only=True):
    """Answer to a prompt."""

    index: int
    text: str
    token_ids: list[int]
    # sum of the logprobs of `token_ids`, if `logprobs` were requested
    cumulative_logprob: float | None
    logprobs: list[ByToken | None] | None  # for each of `token_ids`, if requested
    finish_reason: FinishReason
    stop_reason: StopReason = None  # the matching `stop` or `stop_token_ids`; None for EOS

    def finished(self) -> bool:
        """Return whether the answer has ended, which is always true for `LLM`."""
        return True


class RequestStateStats(Struct, kw_only=True):
    """Times of the first answer to a prompt, in seconds; most by `time.monotonic`."""

    arrival_time: float  # by `time.time`
    queued_ts: float  # arrival at the scheduler
    scheduled_ts: float
    first_token_ts: float
    last_token_ts: float
    first_token_latency: float  # seconds from the arrival to the first token
    num_generation_tokens: int


class RequestOutput(Struct, kw_only=True):
    """Prompt with its answers."""

    request_id: str
    prompt: str | None  # None for token ids or a conversation
    prompt_token_ids: list[int]
    # for each prompt token, if requested; None for the first token
    prompt_logprobs: list[ByToken | None] | None = None
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    outputs: list[CompletionOutput] = []  # `n` answers in order
    finished: bool = False  # True when all of `outputs` have arrived
    metrics: RequestStateStats | None = None  # None if no token has arrived

    def add(self, index: int, reply: GenerateReply, n: int) -> None:
        """Add answer `index` of `n`; answers arrive in any order."""
        self.outputs.append(
            CompletionOutput(
                index=index,
                text=reply.text,
                token_ids=reply.token_ids,
                cumulative_logprob=_sum(reply.logprobs),
                logprobs=by_token(reply.logprobs),
                finish_reason=reply.finish_reason,
                stop_reason=reply.stop_reason,
            )
        )
        self.outputs.sort(key=lambda output: output.index)
        self.finished = len(self.outputs) == n
        if index == 0:
            self.prompt_logprobs = by_token(reply.prompt_logprobs)
            self.num_cached_tokens = reply.usage.cached_tokens
            self.metrics = _stats(reply)


class EmbeddingOutput(Struct, kw_only=True):
    """Embedding, a vector of length 1."""

    embedding: list[float]


class EmbeddingRequestOutput(Struct, kw_only=True):
    """Prompt with its embedding."""

    request_id: str
    outputs: EmbeddingOutput
    num_prompt_tokens: int
    num_cached_tokens: int
    finished: bool = True


class ScoringOutput(Struct, kw_only=True):
    """Score of a pair of texts."""

    score: float


class ScoringRequestOutput(Struct, kw_only=True):
    """Pair of texts with its score."""

    request_id: str
    outputs: ScoringOutput
    finished: bool = True


class BeamSearchSequence(Struct, kw_only=True):
    """Continuation of a prompt found by beam search."""

    tokens: list[int]  # tokens of prompt and output
    logprobs: list[ByToken | None]  # for each token of the output
    cum_logprob: float
    text: str  # text of `tokens`
    finish_reason: FinishReason
    stop_reason: int | None


class BeamSearchOutput(Struct, kw_only=True):
    """The best continuations of a prompt in descending order."""

    sequences: list[BeamSearchSequence]


def request_of(output: RequestOutput, params: SamplingParams) -> GenerateRequest:
    """Return the request whose answers are added to `output`."""
    fields = {name: getattr(params, name) for name in SamplingParams.__struct_fields__}
    return GenerateRequest(prompt=output.prompt_token_ids, request_id=output.request_id, **fields)


def prompts_of(prompts: Any) -> list[str | list[int]]:
    """Return a list of prompts.

    Each prompt is a text, token ids, or vLLM's `{"prompt": text}` or `{"prompt_token_ids": ids}`.
    Raises TypeError and ValueError.
    """
    is_ids = isinstance(prompts, list | tuple) and bool(prompts) and isinstance(prompts[0], int)
    several = [prompts] if is_ids or isinstance(prompts, str | dict) else prompts
    if not isinstance(several, Sequence):
        kind = type(prompts).__name__
        raise TypeError(f"prompts: got {kind}, expected text, token ids, a map, or a list of them")
    return [_prompt_of(prompt) for prompt in several]


def _prompt_of(prompt: Any) -> str | list[int]:
    if isinstance(prompt, dict):
        given = {key: value for key, value in prompt.items() if value is not None}
        if not given or not set(given) <= set(PROMPT_KEYS):
            raise ValueError(
                f"prompt: got a map of {list(given)}, expected one of {' and '.join(PROMPT_KEYS)}"
            )
        prompt = given.get("prompt_token_ids", given.get("prompt"))
    if isinstance(prompt, list | tuple) and all(isinstance(token, int) for token in prompt):
        return list(prompt)
    if not isinstance(prompt, str):
        raise TypeError(f"prompt: got {type(prompt).__name__}, expected text, token ids or a map")
    return prompt


def _stats(reply: GenerateReply) -> RequestStateStats | None:
    if (times := reply.times) is None:
        return None
    last = time.monotonic()
    first = last - times.decode
    return RequestStateStats(
        arrival_time=time.time() - times.decode - times.first_token,
        queued_ts=first - times.prefill - times.queue,
        scheduled_ts=first - times.prefill,
        first_token_ts=first,
        last_token_ts=last,
        first_token_latency=times.first_token,
        num_generation_tokens=reply.usage.output_tokens,
    )


def _sum(positions: list[TokenLogprobs | None] | None) -> float | None:
    if positions is None:
        return None
    return sum(position.logprob for position in positions if position)


def by_token(positions: list[TokenLogprobs | None] | None) -> list[ByToken | None] | None:
    """Return the logprobs of consecutive tokens by token id, or None."""
    if positions is None:
        return None
    return [None if position is None else _tokens(position) for position in positions]


def _tokens(position: TokenLogprobs) -> ByToken:
    """Return the logprobs by token, starting with the sampled token."""
    return {candidate.token_id: candidate for candidate in position.candidates}
