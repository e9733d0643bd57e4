"""The sampler in torch: `argmax(logits / temperature + Gumbel noise)`.

The argmax of logits with Gumbel noise is a sample of their softmax (Gumbel 1954; Maddison et al.
2014, https://arxiv.org/abs/1411.0030). The noise is a function of seed, position and token id, so
that a row's token depends on that row only. The function is Philox-4x32-10 (Salmon et al. 2011,
doi:10.1145/2063384.2063405); its 32-bit integers are held in int64.
`penstock.kernels.sampling.triton_gumbel.words` computes the same function.
"""

import math

import torch
from torch import Tensor

from penstock.kernels.layouts.sampling import RUN, SamplingTensors, column

NUM_ROUNDS = 10
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(seed: Tensor, counter: Words) -> Words:
    """Return four random words for each counter.

    seed: int64; its low word is the first key. counter: four words, int64. All shapes broadcast.
    """
    keys = (seed & _MASK, (seed >> 32) & _MASK)
    for _ in range(NUM_ROUNDS):
        counter = _round(counter, keys)
        keys = ((keys[0] + _KEY_STEPS[0]) & _MASK, (keys[1] + _KEY_STEPS[1]) & _MASK)
    return counter


def uniform(word: Tensor) -> Tensor:
    """Convert random words to float32 between 0 and 1, both excluded.

    Small numbers keep all 32 bits. The largest words would round to 1 and are clamped below 1.
    """
    return ((word.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)


def _round(counter: Words, keys: tuple[Tensor, Tensor]) -> Words:
    # The product of two words may exceed int64, but its bits are still right.
    product_0 = counter[0] * _MULTIPLIERS[0]
    product_2 = counter[2] * _MULTIPLIERS[1]
    return (
        ((product_2 >> 32) & _MASK) ^ counter[1] ^ keys[0],
        product_2 & _MASK,
        ((product_0 >> 32) & _MASK) ^ counter[3] ^ keys[1],
        product_0 & _MASK,
    )


def keep_top_k_top_p(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return the scores after top-k, then top-p, then min-p; -inf for removed tokens.

    scores: [num_rows, vocab_size], already divided by the temperature. top_k, top_p, min_p:
    [num_rows]. The same tokens stay as with transformers' logits processors. Top-k keeps all tokens
    that tie with the k-th. Top-p keeps the likeliest tokens whose sum reaches top_p (nucleus
    sampling, Holtzman et al. 2019, arXiv:1904.09751). Min-p keeps tokens at least min_p times as
    likely as the likeliest (Nguyen et al. 2024, arXiv:2407.01082). Tokens of equal score are kept
    or removed together, also by top-p: a token stays if all strictly likelier tokens sum to less
    than top_p. A threshold thus separates kept and removed scores.
    """
    ordered, token_ids = scores.sort(dim=-1, descending=True, stable=True)
    vocab_size = scores.shape[1]
    last = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size).long() - 1
    kept = ordered >= ordered.gather(1, last[:, None])
    probabilities = ordered.masked_fill(~kept, -math.inf).softmax(-1)
    first_of_equals = ordered.diff(dim=-1, prepend=ordered[:, :1] + 1) != 0
    likelier = (probabilities.cumsum(-1) - probabilities).where(first_of_equals, 0).cummax(-1)[0]
    kept &= (likelier < top_p[:, None]) | (top_p[:, None] >= 1)
    kept &= probabilities >= min_p[:, None] * probabilities[:, :1]
    kept |= ordered == ordered[:, :1]
    return torch.full_like(scores, -math.inf).scatter(
        1, token_ids, ordered.masked_fill(~kept, -math.inf)
    )


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return standard Gumbel noise, float32 [num_rows, vocab_size]; seeds, positions [num_rows].

    A Philox counter serves four token ids. In each run of 4096 ids the first 1024 use the first
    words of the run's 1024 counters, the next 1024 the second words, and so on. A GPU program that
    computes a run then uses every word, for contiguous ids. The key is the seed, and the second
    word of the counter is the position.
    """
    token_ids = torch.arange(vocab_size, device=seeds.device)
    quarter = RUN // 4
    counters = token_ids // RUN * quarter + token_ids % quarter
    drawn = torch.arange(int(counters.max()) + 1, device=seeds.device)
    zero = torch.zeros_like(drawn)
    words = torch.stack(philox(seeds[:, None], (drawn, positions[:, None], zero, zero)), 1)
    word = words[:, token_ids // quarter % 4, counters]
    # -log(1 - u) is exponentially distributed. The winner is among its smallest values, for which u
    # has all 32 bits; -log(u) would have 24.
    return -torch.log(-torch.log1p(-uniform(word)))


def sample(logits: Tensor, slots: Tensor, positions: Tensor, by_slot: SamplingTensors) -> Tensor:
    """Compute `penstock.kernels.sampling.sampling.sample` on any device."""
    largest, tokens = logits.max(-1)  # NaN counts as the largest number
    temperature = column(by_slot.parameters, "temperature")
    rows = ((slots >= 0) & (temperature[slots] > 0)).nonzero().squeeze(1)
    if rows.numel():
        random = slots[rows]
        # The largest score is 0, so a tiny temperature does not overflow.
        scores = logits[rows] - largest[rows, None]
        scores /= temperature[random, None]
        limits = (column(by_slot.parameters, name) for name in ("top_k", "top_p", "min_p"))
        _restrict(scores, *(limit[random] for limit in limits))
        seeds = column(by_slot.parameters, "seed")[random]
        scores += gumbel_noise(seeds, positions[rows], logits.shape[1])
        tokens[rows] = scores.argmax(-1)
    tokens.masked_fill_(~largest.isfinite(), -1).masked_fill_(slots < 0, 0)
    active = slots >= 0
    by_slot.last_token[slots[active]] = tokens[active].clamp(min=0)
    return tokens


def _restrict(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """Apply `keep_top_k_top_p` in place, only to restricted rows, because sorting is slow."""
    rows = ((top_k > 0) | (top_p < 1) | (min_p > 0)).nonzero().squeeze(1)
    if rows.numel():
        scores[rows] = keep_top_k_top_p(scores[rows], top_k[rows], top_p[rows], min_p[rows])
