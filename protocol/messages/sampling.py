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
MAX_N = 128
"""answers to a prompt, where a request may have several"""
MAX_LABELS = 64


class Pooling(Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Numbers that a request returns in place of text, as soon as its prompt is computed.

    By default the embedding: the last token's hidden state after the final norm, of length 1.
    """

    dimensions: Positive | None = None
    """leading numbers of the embedding to keep, and to normalise; None: all"""
    label_ids: Annotated[list[TokenId], Meta(max_length=MAX_LABELS)] = []
    """in place of an embedding: the probability of each of these tokens to be the next one, in
    relation to the others"""


class SamplingParams(Struct, kw_only=True, omit_defaults=True):
    """Parameters of sampling one request's tokens, and of its end.

    `None` for `temperature`, `top_k`, `top_p`, `min_p` or `repetition_penalty` means the model's
    own default, from its `generation_config.json`.
    """

    n: Annotated[int, Meta(ge=1, le=1, description="answers per prompt; a socket gets one")] = 1
    max_tokens: Annotated[
        Positive | None,
        Meta(description="most tokens to generate; otherwise as many as the context holds"),
    ] = None
    temperature: Annotated[Temperature | None, Meta(description="0 is greedy")] = None
    top_k: Annotated[
        TopK | None, Meta(description="keep the k likeliest tokens; 0 and -1 keep all")
    ] = None
    top_p: Annotated[
        TopP | None, Meta(description="keep the likeliest tokens that have this probability")
    ] = None
    min_p: Annotated[
        Share | None, Meta(description="keep tokens this likely, as a share of the likeliest")
    ] = None
    presence_penalty: Annotated[
        Penalty, Meta(description="taken from the logits of tokens that the output has")
    ] = 0.0
    frequency_penalty: Annotated[
        Penalty, Meta(description="likewise, once for each time that the output has the token")
    ] = 0.0
    repetition_penalty: Annotated[
        RepetitionPenalty | None,
        Meta(description="divides positive logits of tokens in prompt and output, or multiplies"),
    ] = None
    logit_bias: Annotated[
        dict[TokenId, Bias], Meta(max_length=1024, description="token id → added to its logit")
    ] = {}
    allowed_token_ids: Annotated[
        Annotated[list[TokenId], Meta(min_length=1, max_length=4096)] | None,
        Meta(description="the only ids that may be sampled; EOS needs to be among them"),
    ] = None
    bad_words: Annotated[
        list[BadWord],
        Meta(max_length=64, description="strings that must not be generated"),
    ] = []
    seed: Annotated[
        Int64 | None, Meta(description="of the noise; otherwise it follows from the request id")
    ] = None
    stop: Annotated[
        Annotated[list[Stop], Meta(max_length=16)] | Stop | None,
        Meta(description="strings that end the text, which stops before them"),
    ] = None
    stop_token_ids: Annotated[
        list[TokenId],
        Meta(max_length=64, description="ids that end the text, in addition to the model's EOS"),
    ] = []
    include_stop_str_in_output: Annotated[
        bool, Meta(description="the text ends after the stop string, not before it")
    ] = False
    ignore_eos: Annotated[bool, Meta(description="continue past EOS, until max_tokens")] = False
    min_tokens: Annotated[
        int, Meta(ge=0, lt=2**31, description="tokens before which nothing ends the text")
    ] = 0
    skip_special_tokens: Annotated[
        bool, Meta(description="leave special tokens out of the text")
    ] = True
    logprobs: Annotated[
        NumLogprobs | None,
        Meta(description="return each token's logprob, and those of N likeliest ones"),
    ] = None
    prompt_logprobs: Annotated[
        NumLogprobs | None, Meta(description="likewise for the tokens of the prompt")
    ] = None
    speculative: Annotated[
        bool, Meta(description="guess tokens ahead, where the pipeline does (--speculative-method)")
    ] = True
    structured_outputs: Annotated[
        StructuredOutputs | None, Meta(description="what the text must match")
    ] = None
