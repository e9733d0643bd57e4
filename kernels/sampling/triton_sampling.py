"""The sampler in Triton: two launches without a sort; the host does not wait.

`_scan_runs` has a program for each row and run of 4096 token ids. For an unrestricted row it finds
the run's best score. For a row with top-k, top-p or min-p it stores the largest logit of every
group of 32 ids and the sum of the softmax. `_finish_rows` has a program for each row. This program
takes the best of the runs, or draws from the groups with likely tokens.

Where the ranks of a tensor-parallel group shard the logits, each rank scans its own runs into a
buffer that its peers can read. After a barrier every rank finishes every row. From its peers it
reads a few numbers for each run. For restricted rows it also reads the likely groups of logits. All
ranks compute the same tokens as one rank with all logits.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.layouts.sampling import SamplingTensors, shard_size
from penstock.kernels.sampling.triton_gumbel import (
    LOG2_E,
    NUM_WORDS,
    QUARTER,
    RUN,
    TEMPERATURE,
    best,
    load_float,
    load_seed,
    noise,
    weight,
    words,
)
from penstock.kernels.sampling.triton_top_k_top_p import (
    GROUP,
    GROUPS_PER_RUN,
    draw,
    is_restricted,
    list_groups,
    load_limits,
)
from penstock.kernels.triton_collectives import Shards, distances_to, shift
from penstock.kernels.triton_pdl import LAUNCH, launch_dependents, wait


def sample(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    by_slot: SamplingTensors,
    out: Tensor | None = None,
) -> Tensor:
    """Compute `penstock.kernels.sampling.sampling.sample`, which checks the arguments."""
    num_rows, vocab_size = logits.shape
    num_runs = triton.cdiv(vocab_size, RUN.value)
    if not num_rows:
        return slots.new_empty(0) if out is None else out
    runs = _Runs(
        logits.new_empty(num_rows, num_runs),
        logits.new_empty(num_rows, num_runs),
        slots.new_empty((num_rows, num_runs), dtype=torch.int32),
        logits.new_empty(num_rows, num_runs * GROUPS_PER_RUN.value),
    )
    arguments = (logits, logits.stride(0), slots, positions, by_slot.parameters, *runs)
    _launch_scan(arguments, vocab_size, Shards(num_runs))
    return _launch_finish(arguments, by_slot.last_token, vocab_size, Shards(num_runs), out)


def buffer_size(max_rows: int, vocab_size: int, num_ranks: int) -> int:
    """Return the number of float32 elements of each rank's buffer."""
    return sum(_sizes(max_rows, shard_size(vocab_size, num_ranks)))


class ShardedSampler:
    """Sampler of one rank, with a buffer for its shard of the logits."""

    def __init__(
        self, buffer: Tensor, addresses: Sequence[int], rank: int, max_rows: int, vocab_size: int
    ) -> None:
        """Divide this rank's buffer, float32 [buffer_size(...)], into arrays. Raises ValueError.

        addresses: addresses of all ranks' buffers, as seen by this rank's device.
        """
        shard = shard_size(vocab_size, len(addresses))
        sizes = _sizes(max_rows, shard)
        if buffer.dtype != torch.float32 or list(buffer.shape) != [sum(sizes)]:
            given = f"{buffer.dtype} {list(buffer.shape)}"
            raise ValueError(f"buffer: got {given}, expected torch.float32 [{sum(sizes)}]")
        logits, group_max, best, total, token = torch.split(buffer, sizes)
        self._logits = logits.view(max_rows, shard)
        self._runs = _Runs(best, total, token.view(torch.int32), group_max)
        self._vocab_size = vocab_size
        distances = distances_to(addresses, rank, buffer.device)
        self._shards = Shards(shard // RUN.value, len(addresses), rank, distances)

    def logits(self, num_rows: int) -> Tensor:
        """Return the memory of this rank's logits: [num_rows, shard_size(...)].

        The first logit belongs to token id rank * shard_size(...). Logits beyond the vocabulary are
        not read.
        """
        return self._logits[:num_rows]

    def sample(
        self,
        barrier: Callable[[], object],
        slots: Tensor,
        positions: Tensor,
        by_slot: SamplingTensors,
    ) -> Tensor:
        """Compute `penstock.kernels.sampling.sampling.sample` for the logits of the first rows.

        All ranks call this method with equal arguments. barrier: launches a barrier of all ranks,
        after which their earlier writes can be read. Another barrier or collective must precede the
        next write to `logits`, because peers may still read them. Raises ValueError.
        """
        num_rows = len(slots)
        if num_rows > len(self._logits):
            raise ValueError(f"slots: got {num_rows} rows, expected at most {len(self._logits)}")
        if not num_rows:
            return slots.new_empty(0)
        rows = (self._logits, self._logits.stride(0), slots, positions)
        arguments = (*rows, by_slot.parameters, *self._runs)
        _launch_scan(arguments, self._vocab_size, self._shards)
        barrier()
        return _launch_finish(arguments, by_slot.last_token, self._vocab_size, self._shards)


def _sizes(max_rows: int, shard: int) -> list[int]:
    """Return the sizes of a buffer's arrays: logits, maxima of groups, three values of each run."""
    num_runs = shard // RUN.value
    return [max_rows * size for size in (shard, num_runs * GROUPS_PER_RUN.value, *[num_runs] * 3)]


class _Runs(NamedTuple):
    """Results of the first kernel for each row and run, as contiguous arrays."""

    best: Tensor  # float32: the best score, or the largest logit
    sum: Tensor  # float32: the sum of the softmax's weights, relative to the largest
    token: Tensor  # int32: the token with the best score
    group_max: Tensor  # float32: the largest logit of each group


def _launch_scan(arguments: Sequence[Any], vocab_size: int, shards: Shards) -> None:
    """Launch the first kernel, for this rank's runs."""
    first_run = shards.rank * shards.runs_per_shard
    num_runs = min(triton.cdiv(vocab_size, RUN.value) - first_run, shards.runs_per_shard)
    if num_runs > 0:
        _scan_runs[(num_runs, len(arguments[2]))](
            *arguments, vocab_size=vocab_size, first_run=first_run,
            runs_per_shard=shards.runs_per_shard, num_warps=4, **LAUNCH,
        )  # fmt: skip


def _launch_finish(
    arguments: Sequence[Any],
    last_token: Tensor,
    vocab_size: int,
    shards: Shards,
    out: Tensor | None = None,
) -> Tensor:
    """Launch the second kernel, after the scans of all ranks; return the tokens, or `out`."""
    slots: Tensor = arguments[2]
    num_rows, num_runs = len(slots), triton.cdiv(vocab_size, RUN.value)
    num_groups = num_runs * GROUPS_PER_RUN.value
    tokens = slots.new_empty(num_rows) if out is None else out
    _finish_rows[(num_rows,)](
        *arguments, slots.new_empty((num_rows, num_groups), dtype=torch.int32),
        tokens, last_token, shards.distances, vocab_size=vocab_size, num_runs=num_runs,
        runs_padded=triton.next_power_of_2(num_runs), runs_per_shard=shards.runs_per_shard,
        num_shards=shards.num_shards, keeps=out is not None, num_warps=8, **LAUNCH,
    )  # fmt: skip
    return tokens


@triton.jit
def _scan_runs(
    logits_ptr, row_stride, slots_ptr, positions_ptr, parameters_ptr, run_best_ptr, run_sum_ptr,
    run_token_ptr, group_max_ptr,
    vocab_size: tl.constexpr, first_run: tl.constexpr, runs_per_shard: tl.constexpr,
):  # fmt: skip
    """Scan one run of one row in each program; grid (this rank's runs, num_rows)."""
    launch_dependents()
    wait()
    run, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        slot_ptr = parameters_ptr + slot * NUM_WORDS
        temperature = load_float(slot_ptr + TEMPERATURE)
        row_ptr = logits_ptr + row.to(tl.int64) * row_stride - first_run * RUN
        at = row * runs_per_shard + run
        run += first_run
        if is_restricted(temperature, load_limits(slot_ptr, vocab_size)):
            largest, total = summarise_run(
                row_ptr, run, temperature, group_max_ptr + at * GROUPS_PER_RUN, vocab_size
            )
            tl.store(run_best_ptr + at, largest)
            tl.store(run_sum_ptr + at, total)
        else:
            seed, position = load_seed(slot_ptr), tl.load(positions_ptr + row)
            score, token = _best_of_run(row_ptr, run, temperature, seed, position, vocab_size)
            tl.store(run_best_ptr + at, score)
            tl.store(run_token_ptr + at, token)


@triton.jit
def _best_of_run(row_ptr, run, temperature, seed, position, vocab_size: tl.constexpr):
    """Return the run's best score and its token; infinity if a logit is NaN or infinite."""
    lane = tl.arange(0, QUARTER)
    first = run * RUN + lane
    l0 = tl.load(row_ptr + first, first < vocab_size, other=-float("inf"))
    id1, id2, id3 = first + QUARTER, first + 2 * QUARTER, first + 3 * QUARTER
    l1 = tl.load(row_ptr + id1, id1 < vocab_size, other=-float("inf"))
    l2 = tl.load(row_ptr + id2, id2 < vocab_size, other=-float("inf"))
    l3 = tl.load(row_ptr + id3, id3 < vocab_size, other=-float("inf"))
    total = (l0 + l1) + (l2 + l3)  # less than infinity unless a logit is NaN or infinite
    if temperature > 0:
        # The largest logit is not known yet; this bound keeps scores finite.
        scale = LOG2_E / tl.maximum(temperature, 1e-6)
        w0, w1, w2, w3 = words(seed, run * QUARTER + lane, position)
        l0 = l0 * scale + noise(w0)
        l1 = l1 * scale + noise(w1)
        l2 = l2 * scale + noise(w2)
        l3 = l3 * scale + noise(w3)
    scores, ids = tl.where(l1 > l0, l1, l0), tl.where(l1 > l0, id1, first)
    scores, ids = tl.where(l2 > scores, l2, scores), tl.where(l2 > scores, id2, ids)
    scores, ids = tl.where(l3 > scores, l3, scores), tl.where(l3 > scores, id3, ids)
    return best(tl.where(total < float("inf"), scores, float("inf")), ids)


@triton.jit
def summarise_run(row_ptr, run, temperature, group_max_ptr, vocab_size: tl.constexpr):
    """Store the groups' largest logits; return the run's largest logit and sum of relative weights.

    The sum is NaN if a logit is NaN or infinite.
    """
    groups = tl.arange(0, GROUPS_PER_RUN)
    ids = run * RUN + groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logits = tl.load(row_ptr + ids, ids < vocab_size, other=-float("inf"))
    group_max = tl.max(logits, 1)
    tl.store(group_max_ptr + groups, group_max)
    largest = tl.max(group_max)
    scale = LOG2_E / tl.maximum(temperature, 1e-30)
    # a grammar may forbid a whole run; the difference of two infinities is NaN
    return largest, tl.sum(weight(logits, tl.maximum(largest, -3e38), scale))


@triton.jit
def _finish_rows(
    logits_ptr, row_stride, slots_ptr, positions_ptr, parameters_ptr, run_best_ptr, run_sum_ptr,
    run_token_ptr, group_max_ptr, group_list_ptr, tokens_ptr, last_token_ptr, distances_ptr,
    vocab_size: tl.constexpr, num_runs: tl.constexpr, runs_padded: tl.constexpr,
    runs_per_shard: tl.constexpr, num_shards: tl.constexpr, keeps: tl.constexpr,
):  # fmt: skip
    """Choose the token of one row in each program; grid (num_rows,)."""
    launch_dependents()
    wait()
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        if not keeps:
            tl.store(tokens_ptr + row, 0)
    else:
        slot_ptr = parameters_ptr + slot * NUM_WORDS
        temperature, limits = load_float(slot_ptr + TEMPERATURE), load_limits(slot_ptr, vocab_size)
        runs = tl.arange(0, runs_padded)
        at = row * runs_per_shard + runs
        at += shift(runs, (distances_ptr, runs_per_shard, num_shards), 1)
        run_best = tl.load(run_best_ptr + at, runs < num_runs, other=-float("inf"))
        if is_restricted(temperature, limits):
            scale = LOG2_E / tl.maximum(temperature, 1e-30)
            largest = tl.max(run_best)
            run_sum = tl.load(run_sum_ptr + at, runs < num_runs, other=0.0)
            total = tl.sum(run_sum * weight(run_best, largest, scale))
            list_ptr = group_list_ptr + row * num_runs * GROUPS_PER_RUN
            token = tl.full((), -1, tl.int32)
            if total > 0:  # False for NaN, or if every token is forbidden
                num_listed = list_groups(
                    group_max_ptr + row * runs_per_shard * GROUPS_PER_RUN,
                    list_ptr,
                    (largest, scale, total),
                    limits,
                    (distances_ptr, runs_per_shard, num_shards),
                    num_runs * GROUPS_PER_RUN,
                    runs_padded * GROUPS_PER_RUN,
                )
                token = draw(
                    (
                        logits_ptr + row.to(tl.int64) * row_stride,
                        (distances_ptr, runs_per_shard, num_shards),
                    ),
                    (list_ptr, num_listed),
                    (largest, scale, total),
                    limits,
                    (load_seed(slot_ptr), tl.load(positions_ptr + row)),
                    vocab_size,
                )
        else:
            run_token = tl.load(run_token_ptr + at, runs < num_runs, other=2**31 - 1)
            score, token = best(run_best, run_token)
            token = tl.where((score > -float("inf")) & (score < float("inf")), token, -1)
        token = tl.minimum(token, vocab_size - 1).to(tl.int64)
        tl.store(tokens_ptr + row, token)
        tl.store(last_token_ptr + slot, tl.maximum(token, 0))
