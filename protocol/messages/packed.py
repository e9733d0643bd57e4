"""Lists of integers as raw little-endian int32, which need no decoding at any length."""

from array import array
from collections.abc import Iterable
from typing import ClassVar

from msgspec import Struct

assert array("i").itemsize == 4  # noqa: S101  the wire format; true wherever CPython runs today


def pack(numbers: Iterable[int]) -> bytes:
    """Return integers as raw little-endian int32."""
    return array("i", numbers).tobytes()


def unpack(data: bytes) -> "array[int]":
    """Invert `pack`. Raises ValueError if the length is not a multiple of 4."""
    numbers = array("i")
    numbers.frombytes(data)
    return numbers


class PackedLists:
    """Mixin of messages with packed lists, which are checked when a message is made or decoded.

    Raises ValueError, which msgspec's decoder turns into a ValidationError.
    """

    __slots__ = ()
    item_bytes: ClassVar[dict[str, int]] = {}  # field → bytes of each item
    parallel: ClassVar[tuple[str, ...]] = ()  # fields with equal numbers of bytes

    def __post_init__(self) -> None:
        for field, size in self.item_bytes.items():
            if (got := len(getattr(self, field))) % size:
                raise ValueError(f"{field}: got {got} bytes, expected a multiple of {size}")
        if self.parallel and len({len(getattr(self, field)) for field in self.parallel}) > 1:
            raise ValueError(f"{self.parallel}: got different numbers of bytes")


class PackedLogprobs(Struct, array_like=True):
    """Logprobs of one position from the worker: first the token itself, then the likeliest."""

    token_ids: bytes  # int32 [1 + k]
    logprobs: bytes  # float32 [1 + k]
    rank: int = 1  # rank of the token itself

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs) or not self.token_ids:
            raise ValueError(
                f"{len(self.token_ids)} bytes of tokens, {len(self.logprobs)} of logprobs"
            )
        if len(self.token_ids) % 4:
            raise ValueError(f"token_ids: got {len(self.token_ids)} bytes, expected int32")

    def pairs(self) -> list[tuple[int, float]]:
        """(token id, logprob) of each token."""
        token_ids, logprobs = array("i"), array("f")
        token_ids.frombytes(self.token_ids)
        logprobs.frombytes(self.logprobs)
        return list(zip(token_ids, logprobs, strict=True))
