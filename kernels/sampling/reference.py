"""The sampler in torch: `argmax(logits / temperature + Gumbel noise)`.

The argmax of logits with Gumbel noise is a sample of their softmax (Gumbel 1954; Maddison et al.
2014, https://arxiv.org/abs/1411.0030). The noise is a function of seed, position and token id, so
that a row's token depends on that row only.
"""

import math

import torch
from torch import Tensor

from penstock.kernels.layouts.sampling import RUN, SamplingTensors
from penstock.kernels.sampling.philox import philox, uniform


def keep_top_k_top_p(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return the scores after top-k, then top-p, then min-p; -inf for removed tokens.

    scores: [num_rows, vocab_size], already divided by the temperature; the others [num_rows]. The
    same tokens stay as with transformers' logits processors: all that tie with the k-th, the
    likeliest whose sum reaches top_p (nucleus sampling, Holtzman et al. 2019, arXiv:1904.09751),
    and all that are at least min_p times as likely as the likeliest (Nguyen et al. 2024,
    arXiv:2407.01082). Tokens of equal score are kept or removed together, for top-p too: a token
    stays if all strictly likelier tokens sum to less than top_p. A threshold thus separates kept
    and removed scores.
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
    # -log(1 - u) is exponentially distributed. The winner is among its smallest values, where u has
    # all its 32 bits; -log(u) would have 24.
    return -torch.log(-torch.log1p(-uniform(word)))


def sample(logits: Tensor, slots: Tensor, positions: Tensor, by_slot: SamplingTensors) -> Tensor:
    """Compute `penstock.kernels.sampling.sampling.sample` on any device."""
    largest, tokens = logits.max(-1)  # NaN counts as the largest number
    rows = ((slots >= 0) & (by_slot.temperature[slots] > 0)).nonzero().squeeze(1)
    if rows.numel():
        random = slots[rows]
        # The largest score is 0, so that a tiny temperature does not overflow.
        scores = logits[rows] - largest[rows, None]
        scores /= by_slot.temperature[random, None]
        _restrict(scores, by_slot.top_k[random], by_slot.top_p[random], by_slot.min_p[random])
        scores += gumbel_noise(by_slot.seeds[random], positions[rows], logits.shape[1])
        tokens[rows] = scores.argmax(-1)
    tokens.masked_fill_(~largest.isfinite(), -1).masked_fill_(slots < 0, 0)
    active = slots >= 0
    by_slot.last_token[slots[active]] = tokens[active].clamp(min=0)
    return tokens


def _restrict(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """Apply `keep_top_k_top_p` in place to restricted rows only, because sorting is slow."""
    rows = ((top_k > 0) | (top_p < 1) | (min_p > 0)).nonzero().squeeze(1)
    if rows.numel():
        scores[rows] = keep_top_k_top_p(scores[rows], top_k[rows], top_p[rows], min_p[rows])
