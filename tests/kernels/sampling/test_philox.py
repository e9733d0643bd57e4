"""Philox against the known answers of its authors, and the floats made of it."""

import pytest
import torch

from penstock.kernels.sampling.reference import philox, uniform

MAX = 0xFFFFFFFF
# `kat_vectors` of Random123 (https://github.com/DEShawResearch/random123): counter, key, words.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MAX, MAX, MAX, MAX), (MAX, MAX), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def int64(value: int) -> torch.Tensor:
    """Return the 64 bits of an unsigned number."""
    return torch.tensor(value - (value >> 63 << 64), dtype=torch.int64)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = map(int64, counter)
    result = philox(int64(key[0] | key[1] << 32), (c0, c1, c2, c3))
    assert tuple(int(word) for word in result) == words


def test_broadcasts_seeds_against_counters() -> None:
    seeds, tokens, zero = torch.tensor([[3], [-4]]), torch.arange(5), torch.tensor(0)
    together = philox(seeds, (tokens, zero, zero, zero))[0]
    for row, seed in enumerate(seeds):
        for token in range(5):
            alone = philox(seed, (tokens[token : token + 1], zero, zero, zero))[0]
            assert alone.item() == together[row, token].item()


def test_uniform_lies_strictly_between_0_and_1() -> None:
    ends = uniform(torch.tensor([0, 1, 2**31, MAX - 1, MAX]))
    assert ends.dtype == torch.float32
    assert ends.tolist() == [2.0**-33, 1.5 * 2.0**-32, 0.5, 1 - 2.0**-24, 1 - 2.0**-24]
