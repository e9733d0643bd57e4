"""Sampling parameters: the name, type, limit and default of each, written here only."""

from typing import Annotated

from msgspec import Meta, Struct

from penstock.protocol.messages.structured import StructuredOutputs

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Positive = Annotated[int, Meta(ge=1, lt=2**31)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopK = Annotated[int, Meta(ge=-1, lt=2**31)]
TopP = Annotated[float, Meta(gt=0, le=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=100)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
NumLogprobs = Annotated[int, Meta(ge=0, le=20)]
Stop = Annotated[str, Meta(min_length=1, max_length=256)]
BadWord = Annotated[str, Meta(min_length=1, max_length=128)]
MAX_N = 128  # answers to a prompt
MAX_LABELS = 64


class Pooling(Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Request for numbers in place of text, which are returned after prefill.

    By default the numbers are the embedding: the last token's hidden state after the final norm,
    normalised to length 1.
    """

    # leading numbers of the embedding to keep, and to normalise; None: all
    dimensions: Positive | None = None
    # if given, return the next-token probabilities of these tokens instead, normalised over them
    label_ids: Annotated[list[TokenId], Meta(max_length=MAX_LABELS)] = []


class SamplingParams(Struct, kw_only=True, omit_defaults=True):
    """Parameters of sampling one request's tokens, and of its end.

    `None` for `temperature`, `top_k`, `top_p`, `min_p`, `presence_penalty` or `repetition_penalty`
    means the model's own default, from its `generation_config.json`.
    """

    n: Annotated[int, Meta(ge=1, le=MAX_N, description="number of answers to the prompt")] = 1
    max_tokens: Annotated[
        Positive | None,
        Meta(description="maximum number of output tokens; default: the rest of the context"),
    ] = None
    temperature: Annotated[
        Temperature | None, Meta(description="sampling temperature; 0: greedy")
    ] = None
    top_k: Annotated[
        TopK | None, Meta(description="sample from the k most likely tokens; 0 and -1: all")
    ] = None
    top_p: Annotated[
        TopP | None, Meta(description="sample from the top tokens with this total probability")
    ] = None
    min_p: Annotated[
        Share | None, Meta(description="minimum probability, relative to the top token's")
    ] = None
    presence_penalty: Annotated[
        Penalty | None, Meta(description="subtracted from the logits of tokens in the output")
    ] = None
    frequency_penalty: Annotated[
        Penalty, Meta(description="subtracted from a token's logit per occurrence in the output")
    ] = 0.0
    repetition_penalty: Annotated[
        RepetitionPenalty | None,
        Meta(description="factor against tokens in prompt and output; above 1: less repetition"),
    ] = None
    logit_bias: Annotated[
        dict[TokenId, Bias],
        Meta(max_length=1024, description="map from token ids to values added to their logits"),
    ] = {}
    allowed_token_ids: Annotated[
        Annotated[list[TokenId], Meta(min_length=1, max_length=4096)] | None,
        Meta(description="the only token ids that may be sampled; include EOS"),
    ] = None
    bad_words: Annotated[
        list[BadWord], Meta(max_length=64, description="strings that must not be generated")
    ] = []
    seed: Annotated[
        Int64 | None, Meta(description="random seed; default: derived from the request id")
    ] = None
    stop: Annotated[
        Annotated[list[Stop], Meta(max_length=16)] | Stop | None,
        Meta(description="strings that end the text, not included in it"),
    ] = None
    stop_token_ids: Annotated[
        list[TokenId],
        Meta(max_length=64, description="token ids that end the text, like the model's EOS"),
    ] = []
    include_stop_str_in_output: Annotated[
        bool, Meta(description="include the stop string in the text")
    ] = False
    ignore_eos: Annotated[bool, Meta(description="continue after EOS, up to max_tokens")] = False
    min_tokens: Annotated[
        int, Meta(ge=0, lt=2**31, description="minimum number of output tokens")
    ] = 0
    skip_special_tokens: Annotated[
        bool, Meta(description="leave special tokens out of the text")
    ] = True
    logprobs: Annotated[
        NumLogprobs | None,
        Meta(description="return each token's logprob and the N highest logprobs"),
    ] = None
    prompt_logprobs: Annotated[
        NumLogprobs | None, Meta(description="as logprobs, for prompt tokens")
    ] = None
    speculative: Annotated[
        bool, Meta(description="use speculative decoding, if enabled (--speculative-method)")
    ] = True
    structured_outputs: Annotated[
        StructuredOutputs | None,
        Meta(description="JSON schema, regex, choice or grammar that the text must match"),
    ] = None

    def numbers(self) -> dict[str, float]:
        """Return the values of NUMBERS that are not neutral, by name."""
        given = {name: getattr(self, name) for name in NUMBERS}
        if given["top_k"] == -1:  # the same as 0
            del given["top_k"]
        return {
            name: number
            for name, number in given.items()
            if number is not None and number != NUMBERS[name]
        }


# Numbers that the worker keeps for each slot, with their neutral values. The sampler chooses tokens
# by SAMPLER_NUMBERS; LOGITS_NUMBERS change the logits before.
SAMPLER_NUMBERS: dict[str, float] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
LOGITS_NUMBERS: dict[str, float] = {
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
NUMBERS = SAMPLER_NUMBERS | LOGITS_NUMBERS
