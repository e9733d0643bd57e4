"""Logprobs: how the worker packs them, and how a client sees them."""

from array import array

from msgspec import Struct


class Logprob(Struct, kw_only=True):
    """One token that could stand at a position."""

    token_id: int
    # natural logarithm of its probability under the model's own logits: before temperature,
    # penalties, bias and restrictions
    logprob: float
    rank: int  # place among all tokens in the order of their logprobs; 1: the likeliest
    token: str  # its text; bytes that are not UTF-8 are shown as U+FFFD
    bytes: list[int]


class TokenLogprobs(Logprob, kw_only=True):
    """The token that does stand there, and the likeliest ones that could."""

    top: list[Logprob]  # likeliest first; up to the requested number
    # where the token's text begins in the output; None for a token of the prompt
    text_offset: int | None = None


class PackedLogprobs(Struct, array_like=True):
    """One position, as the worker sends it: the token itself first, then the likeliest ones."""

    token_ids: bytes  # int32 [1 + k]
    logprobs: bytes  # float32 [1 + k]
    rank: int = 1  # of the token itself

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs) or not self.token_ids:
            raise ValueError(
                f"{len(self.token_ids)} bytes of tokens, {len(self.logprobs)} of logprobs"
            )
        if len(self.token_ids) % 4:
            raise ValueError(f"token_ids: got {len(self.token_ids)} bytes, expected int32")

    def pairs(self) -> list[tuple[int, float]]:
        """(token id, logprob) of each."""
        token_ids, logprobs = array("i"), array("f")
        token_ids.frombytes(self.token_ids)
        logprobs.frombytes(self.logprobs)
        return list(zip(token_ids, logprobs, strict=True))
