"""Sampling parameters: the name, type, limit and default of each, written here only."""

from typing import Annotated

from msgspec import Meta, Struct

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Positive = Annotated[int, Meta(ge=1, lt=2**31)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopK = Annotated[int, Meta(ge=-1, lt=2**31)]
TopP = Annotated[float, Meta(gt=0, le=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Stop = Annotated[str, Meta(min_length=1, max_length=256)]


class SamplingParams(Struct, kw_only=True, omit_defaults=True):
    """How the tokens of one request are chosen, and when to stop.

    `None` for `temperature`, `top_k`, `top_p` or `min_p` means the model's own default, from its
    `generation_config.json`.
    """

    n: Annotated[int, Meta(ge=1, le=1)] = 1
    """answers per prompt; one is supported"""
    max_tokens: Positive | None = None
    """most tokens to generate; None: as many as the context holds"""
    temperature: Temperature | None = None
    """0 is greedy"""
    top_k: TopK | None = None
    """keep the k likeliest tokens; 0 and -1 keep all"""
    top_p: TopP | None = None
    """keep the likeliest tokens that together have this probability"""
    min_p: Share | None = None
    """keep tokens at least this likely, as a share of the likeliest"""
    seed: Int64 | None = None
    """of the sampling noise; None: derived from the request id"""
    stop: Annotated[list[Stop], Meta(max_length=16)] | Stop | None = None
    """strings that end the text; the text returned stops before them"""
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] = []
    """token ids that end the text, beside the model's EOS"""
    ignore_eos: bool = False
    """go on past EOS, until max_tokens"""

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop
