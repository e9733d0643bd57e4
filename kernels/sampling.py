"""Choosing the next token: `argmax(logits / temperature + Gumbel noise)`.

The argmax of logits with Gumbel noise is a sample of their softmax (Gumbel 1954; Maddison et al.
2014, https://arxiv.org/abs/1411.0030). The noise is a function of seed, position and token id, so
a row's token depends on nothing but the row.
"""

import math

import torch
from torch import Tensor

from penstock.kernels.checks import check_tensor
from penstock.kernels.philox import philox, uniform


def sample(
    logits: Tensor,
    *,
    positions: Tensor,
    seeds: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    """One token id per row, int64 [num_rows]; of equal scores the lowest id wins.

    logits float32 [num_rows, vocab_size]; the others [num_rows]: positions int64 (index of the new
    token in its sequence), seeds int64, temperature float32 (0: the likeliest token), top_k int32
    (0 or less: all), top_p float32 (1: all), min_p float32 (0: all).
    """
    check_tensor("logits", logits, (-1, -1), torch.float32)
    rows = (logits.shape[0],)
    check_tensor("positions", positions, rows, torch.int64)
    check_tensor("seeds", seeds, rows, torch.int64)
    check_tensor("top_k", top_k, rows, torch.int32)
    for name, values in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        check_tensor(name, values, rows, torch.float32)
    return _sample_reference(logits, positions, seeds, temperature, top_k, top_p, min_p)


def keep_likely(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Scores of the tokens that top-k, then top-p, then min-p leave; -inf for the others.

    scores [num_rows, vocab_size], already divided by the temperature; the others [num_rows]. The
    same tokens stay as with transformers' logits processors: all that tie with the k-th, the
    likeliest whose sum reaches top_p (nucleus sampling, Holtzman et al. 2019, arXiv:1904.09751),
    and those at least min_p times as likely as the likeliest (Nguyen et al. 2024,
    arXiv:2407.01082).
    """
    ordered, token_ids = scores.sort(dim=-1, descending=True, stable=True)
    vocab_size = scores.shape[1]
    last = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size).long() - 1
    kept = ordered >= ordered.gather(1, last[:, None])
    probabilities = ordered.masked_fill(~kept, -math.inf).softmax(-1)
    likelier = probabilities.cumsum(-1) - probabilities
    kept &= (likelier < top_p[:, None]) | (top_p[:, None] >= 1)
    kept &= probabilities >= min_p[:, None] * probabilities[:, :1]
    kept[:, 0] = True
    return torch.full_like(scores, -math.inf).scatter(
        1, token_ids, ordered.masked_fill(~kept, -math.inf)
    )


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, float32 [num_rows, vocab_size]; seeds, positions int64 [num_rows]."""
    token_ids = torch.arange(vocab_size, device=seeds.device)
    zero = torch.zeros_like(token_ids)
    word, *_ = philox(seeds[:, None], (token_ids, positions[:, None], zero, zero))
    # -log(1 - u) is exponentially distributed. The winner is among the smallest of these, where u
    # has all its 32 bits; -log(u) would have 24 there.
    return -torch.log(-torch.log1p(-uniform(word)))


def _sample_reference(
    logits: Tensor,
    positions: Tensor,
    seeds: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    tokens = logits.argmax(-1)
    random = (temperature > 0).nonzero().squeeze(1)
    if random.numel():
        # The largest score is 0, so that a tiny temperature makes no infinity.
        scores = logits[random] - logits[random].amax(-1, keepdim=True)
        scores /= temperature[random, None]
        _restrict(scores, top_k[random], top_p[random], min_p[random])
        scores += gumbel_noise(seeds[random], positions[random], logits.shape[1])
        tokens[random] = scores.argmax(-1)
    return tokens


def _restrict(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """Applies `keep_likely` in place to the rows that ask for it: sorting is dear."""
    rows = ((top_k > 0) | (top_p < 1) | (min_p > 0)).nonzero().squeeze(1)
    if rows.numel():
        scores[rows] = keep_likely(scores[rows], top_k[rows], top_p[rows], min_p[rows])
