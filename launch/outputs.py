"""What `LLM` takes and gives, shaped as in vLLM."""

from typing import Annotated

from msgspec import Meta, Struct

from penstock.protocol import sampling
from penstock.protocol.client import FinishReason, GenerateReply, GenerateRequest
from penstock.protocol.logprobs import Logprob, TokenLogprobs

MAX_N = 64
ByToken = dict[int, Logprob]
"""token id → its logprob: the token that stands at a position, and the likeliest ones"""


class SamplingParams(sampling.SamplingParams, kw_only=True):
    """How the answers to a prompt are chosen. What is None is the model's own default."""

    n: Annotated[int, Meta(ge=1, le=MAX_N)] = 1
    """answers to a prompt; with a `seed`, answer i has the seed + i"""

    def __post_init__(self) -> None:
        if not 1 <= self.n <= MAX_N:
            raise ValueError(f"n is {self.n}: expected 1 to {MAX_N}")

    def request(self, token_ids: list[int], name: str, index: int) -> GenerateRequest:
        """The request of the answer `index` to the prompt `name`."""
        fields = {
            field: getattr(self, field) for field in sampling.SamplingParams.__struct_fields__
        }
        fields["n"] = 1
        if self.seed is not None:
            fields["seed"] = self.seed + index
        if index:
            fields["prompt_logprobs"] = None  # those of the first answer are for all
        return GenerateRequest(prompt=token_ids, request_id=f"{name}-{index}", **fields)


class CompletionOutput(Struct, kw_only=True):
    """One answer to a prompt."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[ByToken | None] | None
    """one for each of `token_ids`, if they were asked for"""
    finish_reason: FinishReason


class RequestOutput(Struct, kw_only=True):
    """One prompt with its answers."""

    request_id: str
    prompt: str | None
    """None where token ids or a conversation were given"""
    prompt_token_ids: list[int]
    prompt_logprobs: list[ByToken | None] | None = None
    """one for each prompt token, None for the first, if they were asked for"""
    num_cached_tokens: int = 0
    """of the prompt, from the prefix cache"""
    outputs: list[CompletionOutput] = []
    """as many as `n`, in order"""

    def add(self, index: int, reply: GenerateReply) -> None:
        """Takes answer `index`; they come in any order."""
        self.outputs.append(
            CompletionOutput(
                index=index,
                text=reply.text,
                token_ids=reply.token_ids,
                logprobs=_by_token(reply.logprobs),
                finish_reason=reply.finish_reason,
            )
        )
        self.outputs.sort(key=lambda one: one.index)
        if index == 0:
            self.prompt_logprobs = _by_token(reply.prompt_logprobs)
            self.num_cached_tokens = reply.usage.cached_tokens


def _by_token(positions: list[TokenLogprobs | None] | None) -> list[ByToken | None] | None:
    if positions is None:
        return None
    return [None if one is None else _tokens(one) for one in positions]


def _tokens(position: TokenLogprobs) -> ByToken:
    """The token itself first."""
    return {one.token_id: one for one in (position, *position.top)}
