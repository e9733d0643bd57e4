"""Choosing the next token: `argmax(logits / temperature + Gumbel noise)`.

The argmax of logits with Gumbel noise is a sample of their softmax (Gumbel 1954; Maddison et al.
2014, https://arxiv.org/abs/1411.0030). The noise is a function of seed, position and token id, so
a row's token depends on nothing but the row.
"""

import math

import torch
from torch import Tensor

from penstock.kernels.checks import check_contiguous, check_tensor
from penstock.kernels.sampling.philox import philox, uniform

RUN = 4096
"""token ids that share a run of counters; 1024 counters of four words each"""
_DTYPES = {"seeds": torch.int64, "top_k": torch.int32, "last_token": torch.int64}


def shard_size(vocab_size: int, num_ranks: int) -> int:
    """Token ids of each rank's part of the vocabulary, whole runs; the last ones may have less."""
    return -(-vocab_size // (RUN * num_ranks)) * RUN


def sample(
    logits: Tensor,
    *,
    slots: Tensor,
    positions: Tensor,
    seeds: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    last_token: Tensor,
) -> Tensor:
    """One token id per row, int64 [num_rows]; of equal scores the lowest id wins.

    -1 for a row in which a logit is NaN or +inf, or all are -inf; its `last_token` is 0, which the
    model has. -inf forbids a token.

    logits float32 [num_rows, vocab_size], rows may lie apart; slots, positions int64 [num_rows]:
    index of the row's parameters (-1: a padded row, its token is 0), index of the new token in its
    sequence. By slot, [num_slots]: seeds int64, temperature float32 (0: the likeliest token), top_k
    int32 (0 or less: all), top_p float32 (1: all), min_p float32 (0: all), and last_token int64,
    where the token is written too. Raises ValueError.
    """
    check_tensor("logits", logits, (-1, -1), torch.float32)
    if logits.stride(1) != 1:
        raise ValueError(f"logits has strides {list(logits.stride())}; the last must be 1")
    for name, values in (("slots", slots), ("positions", positions)):
        check_tensor(name, values, (logits.shape[0],), torch.int64)
        check_contiguous(name, values)
    parameters = {"seeds": seeds, "temperature": temperature, "top_k": top_k}
    parameters |= {"top_p": top_p, "min_p": min_p, "last_token": last_token}
    for name, values in parameters.items():
        check_tensor(name, values, (seeds.numel(),), _DTYPES.get(name, torch.float32))
        check_contiguous(name, values)
    if logits.is_cuda:
        from penstock.kernels.sampling.triton_sampling import (
            sample as sample_gpu,  # Triton: not on every CPU
        )

        return sample_gpu(
            logits, slots, positions, seeds, temperature, top_k, top_p, min_p, last_token
        )
    return _sample_reference(
        logits, slots, positions, seeds, temperature, top_k, top_p, min_p, last_token
    )


def keep_likely(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Scores of the tokens that top-k, then top-p, then min-p leave; -inf for the others.

    scores [num_rows, vocab_size], already divided by the temperature; the others [num_rows]. The
    same tokens stay as with transformers' logits processors: all that tie with the k-th, the
    likeliest whose sum reaches top_p (nucleus sampling, Holtzman et al. 2019, arXiv:1904.09751),
    and those at least min_p times as likely as the likeliest (Nguyen et al. 2024,
    arXiv:2407.01082). Tokens of equal score stay or go together, here also for top-p: one stays if
    all that are strictly likelier sum to less than top_p. So what stays is all from some score up.
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
    """Standard Gumbel noise, float32 [num_rows, vocab_size]; seeds, positions int64 [num_rows].

    One Philox counter serves four token ids. Of each run of 4096 ids the first 1024 take the first
    words of the run's 1024 counters, the next 1024 the second words, and so on: a GPU program that
    takes a run uses every word, for contiguous ids. Key: the seed; second counter: the position.
    """
    token_ids = torch.arange(vocab_size, device=seeds.device)
    quarter = RUN // 4
    counters = token_ids // RUN * quarter + token_ids % quarter
    drawn = torch.arange(int(counters.max()) + 1, device=seeds.device)
    zero = torch.zeros_like(drawn)
    words = torch.stack(philox(seeds[:, None], (drawn, positions[:, None], zero, zero)), 1)
    word = words[:, token_ids // quarter % 4, counters]
    # -log(1 - u) is exponentially distributed. The winner is among the smallest of these, where u
    # has all its 32 bits; -log(u) would have 24 there.
    return -torch.log(-torch.log1p(-uniform(word)))


def _sample_reference(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    seeds: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    last_token: Tensor,
) -> Tensor:
    largest, tokens = logits.max(-1)  # NaN is larger than any number
    rows = ((slots >= 0) & (temperature[slots] > 0)).nonzero().squeeze(1)
    if rows.numel():
        random = slots[rows]
        # The largest score is 0, so that a tiny temperature makes no infinity.
        scores = logits[rows] - largest[rows, None]
        scores /= temperature[random, None]
        _restrict(scores, top_k[random], top_p[random], min_p[random])
        scores += gumbel_noise(seeds[random], positions[rows], logits.shape[1])
        tokens[rows] = scores.argmax(-1)
    tokens.masked_fill_(~largest.isfinite(), -1).masked_fill_(slots < 0, 0)
    active = slots >= 0
    last_token[slots[active]] = tokens[active].clamp(min=0)
    return tokens


def _restrict(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """Applies `keep_likely` in place to the rows that ask for it: sorting is dear."""
    rows = ((top_k > 0) | (top_p < 1) | (min_p > 0)).nonzero().squeeze(1)
    if rows.numel():
        scores[rows] = keep_likely(scores[rows], top_k[rows], top_p[rows], min_p[rows])
