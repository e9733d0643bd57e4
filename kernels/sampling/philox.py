"""Random numbers by counter: Philox-4x32-10 (Salmon et al. 2011, doi:10.1145/2063384.2063405).

A number is a function of a key and a counter. Without state, the order and the device of draws do
not matter. Integers are 32 bits wide, held in int64.
`penstock.kernels.sampling.triton_gumbel.words` computes the same.
"""

import torch
from torch import Tensor

NUM_ROUNDS = 10
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(seed: Tensor, counter: Words) -> Words:
    """Return four random words for each counter.

    seed: int64, whose low word is the first key. counter: four words. All shapes broadcast.
    """
    for name, words in zip(("seed", "c0", "c1", "c2", "c3"), (seed, *counter), strict=True):
        if words.dtype != torch.int64:
            raise ValueError(f"{name}: got dtype {words.dtype}, expected torch.int64")
    keys = (seed & _MASK, (seed >> 32) & _MASK)
    for _ in range(NUM_ROUNDS):
        counter = _round(counter, keys)
        keys = ((keys[0] + _KEY_STEPS[0]) & _MASK, (keys[1] + _KEY_STEPS[1]) & _MASK)
    return counter


def uniform(word: Tensor) -> Tensor:
    """Return random words as float32 between 0 and 1, both excluded.

    Small numbers keep all 32 bits. The largest words would round to 1 and are clamped below 1.
    """
    return ((word.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)


def _round(counter: Words, keys: tuple[Tensor, Tensor]) -> Words:
    # The product of two words may exceed int64; its bits are right all the same.
    product_0 = counter[0] * _MULTIPLIERS[0]
    product_2 = counter[2] * _MULTIPLIERS[1]
    return (
        ((product_2 >> 32) & _MASK) ^ counter[1] ^ keys[0],
        product_2 & _MASK,
        ((product_0 >> 32) & _MASK) ^ counter[3] ^ keys[1],
        product_0 & _MASK,
    )
