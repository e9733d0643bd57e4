"""Changes to logits, and logprobs, in Triton; `penstock.kernels.sampling.logits` describes them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.layouts import sampling as layout
from penstock.kernels.layouts.sampling import LogitsState
from penstock.kernels.sampling.triton_gumbel import NUM_WORDS, RUN, load_float
from penstock.kernels.sampling.triton_sampling import summarise_run
from penstock.kernels.sampling.triton_top_k_top_p import GROUP, GROUPS_PER_RUN
from penstock.kernels.triton_pdl import LAUNCH, launch_dependents, wait

# programs per row in a large batch, and in a small batch; few, because most rows need no change
PROGRAMS_PER_ROW, NUM_PROGRAMS = 8, 1024
# small: a program has many registers, and other programs need some while it waits for memory
BLOCK, MASK_BLOCK = 1024, 4096
_BIAS_BLOCK = tl.constexpr(256)
_PENALTIES, _BIAS = tl.constexpr(layout.PENALTIES), tl.constexpr(layout.BIAS)
_MASK, _DEFERRED = tl.constexpr(layout.MASK), tl.constexpr(layout.DEFERRED)
_MAX_BIAS = tl.constexpr(layout.MAX_BIAS)
_FLAGS, _NUM_GIVEN = tl.constexpr(layout.WORD["flags"]), tl.constexpr(layout.WORD["num_given"])
_REPETITION = tl.constexpr(layout.WORD["repetition_penalty"])
_FREQUENCY = tl.constexpr(layout.WORD["frequency_penalty"])
_PRESENCE = tl.constexpr(layout.WORD["presence_penalty"])
_MIN_LENGTH = tl.constexpr(layout.WORD["min_length"])
_NUM_BIAS = tl.constexpr(layout.WORD["num_bias"])
_NUM_LONG_BIAS = tl.constexpr(layout.WORD["num_long_bias"])


def process(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    newest: Tensor,
    state: LogitsState,
    deferred: bool,
) -> None:
    """Compute `penstock.kernels.sampling.logits.process_logits` in one launch."""
    num_tokens = state.occurrences.shape[1]
    num_programs = max(PROGRAMS_PER_ROW, NUM_PROGRAMS // len(slots))
    num_programs = min(num_programs, triton.cdiv(num_tokens, BLOCK))
    _process[(num_programs, len(slots))](
        logits, logits.stride(0), slots, positions, newest, *state[1:], state.bitmask.shape[1],
        state.first_token, num_tokens=num_tokens, deferred=deferred, BLOCK=BLOCK, num_warps=4,
        enable_fp_fusion=False, **LAUNCH,
    )  # fmt: skip


def mask(logits: Tensor, bitmask: Tensor, slots: Tensor) -> None:
    """Compute `penstock.kernels.sampling.logits.apply_bitmask` in one launch."""
    num_tokens = logits.shape[1]
    if len(slots):
        _mask[(triton.cdiv(num_tokens, MASK_BLOCK), len(slots))](
            logits, logits.stride(0), slots, bitmask, bitmask.shape[1], num_tokens=num_tokens,
            BLOCK=MASK_BLOCK, num_warps=8, **LAUNCH,
        )  # fmt: skip


def top_logprobs(
    logits: Tensor, token_ids: Tensor, num_likeliest: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `penstock.kernels.sampling.logits.top_logprobs`, reading all logits once.

    The likeliest tokens are in the groups of 32 tokens with the largest maxima.
    """
    num_rows, vocab_size = logits.shape
    num_runs = triton.cdiv(vocab_size, RUN.value)
    run_max, run_sum = logits.new_empty(2, num_rows, num_runs)
    group_max = logits.new_empty(num_rows, num_runs * GROUPS_PER_RUN.value)
    run_rank = token_ids.new_empty(num_rows, num_runs)
    _summarise[(num_runs, num_rows)](
        logits, logits.stride(0), token_ids, run_max, run_sum, group_max, run_rank,
        vocab_size=vocab_size, num_warps=4, **LAUNCH,
    )  # fmt: skip
    total = torch.logsumexp(run_max + run_sum.log(), 1, keepdim=True)
    groups = group_max.topk(min(num_likeliest, -(-vocab_size // GROUP.value))).indices
    lanes = torch.arange(GROUP.value, device=logits.device)
    ids = (groups[:, :, None] * GROUP.value + lanes).flatten(1)
    beyond = ids >= vocab_size
    found = logits.gather(1, ids.masked_fill(beyond, 0)).masked_fill(beyond, -torch.inf)
    likeliest = found.topk(min(num_likeliest, vocab_size))
    given = token_ids[:, None]
    all_ids = torch.cat([given, ids.gather(1, likeliest.indices)], 1)
    logprobs = torch.cat([logits.gather(1, given), likeliest.values], 1) - total
    return all_ids, logprobs, run_rank.sum(1)


@triton.jit
def _penalize(
    logits_ptr, occurrences_ptr, repetition, frequency, presence, ids, exists, newest,
    ignored_ptr, num_ignored, first_token,
):  # fmt: skip
    """Penalize the logits of tokens that occurred; newest: token to be counted, or -1."""
    occurrences = tl.load(occurrences_ptr + ids, exists, 0)
    is_new = exists & (ids == newest)
    occurrences = tl.where(is_new, occurrences + 2, occurrences)
    tl.store(occurrences_ptr + ids, occurrences, is_new)
    for index in range(num_ignored):
        ignored = tl.load(ignored_ptr + index) - first_token
        occurrences = tl.where(ids == ignored, occurrences - 2, occurrences)
    occurred = exists & (occurrences > 0)
    logits = tl.load(logits_ptr + ids, occurred, 0.0)
    repetition += tl.zeros_like(logits)
    logits = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
    count = occurrences >> 1
    logits = logits - frequency * count.to(tl.float32)
    logits = logits - tl.where(count > 0, presence, 0.0)
    tl.store(logits_ptr + ids, logits, occurred)


@triton.jit
def _add_bias(logits_ptr, bias_ptr, number, first_token, begin, end):
    """Add the biases of the tokens from begin to end."""
    for at in range(0, number, _BIAS_BLOCK):
        entry = at + tl.arange(0, _BIAS_BLOCK)
        ids = tl.load(bias_ptr + entry, entry < number, -1) - first_token
        here = (entry < number) & (ids >= begin) & (ids < end)
        values = tl.load(bias_ptr + _MAX_BIAS + entry, here, 0).to(tl.float32, bitcast=True)
        tl.atomic_add(logits_ptr + ids, values, here)


@triton.jit
def _forbid(logits_ptr, bitmask_ptr, num_words, first_token, ids, exists):
    """Set the logits of tokens to -inf if their bit is not set."""
    word = (first_token + ids) // 32
    words = tl.load(bitmask_ptr + word, exists & (word < num_words), 0)
    allowed = (words >> ((first_token + ids) % 32)) & 1
    infinity = tl.full(ids.shape, float("inf"), tl.float32)
    tl.store(logits_ptr + ids, -infinity, exists & (allowed == 0))


@triton.jit(do_not_specialize=["first_token"])
def _process(
    logits_ptr, row_stride, slots_ptr, positions_ptr, newest_ptr, parameters_ptr, occurrences_ptr,
    bias_ptr, bitmask_ptr, num_words, first_token, num_tokens: tl.constexpr,
    deferred: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Process a part of a row in each program; grid (parts, num_rows)."""
    launch_dependents()
    wait()
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        parameters_ptr += slot * NUM_WORDS
        flags = tl.load(parameters_ptr + _FLAGS)
        if not deferred:
            flags = tl.where((flags & _DEFERRED) > 0, 0, flags)
        if flags > 0:
            logits_ptr += row * row_stride
            position = tl.load(positions_ptr + row)
            is_short = position < tl.load(parameters_ptr + _MIN_LENGTH)
            column = tl.where(is_short, _NUM_LONG_BIAS, _NUM_BIAS)
            num_bias = tl.load(parameters_ptr + column)
            size = tl.cdiv(tl.cdiv(num_tokens, BLOCK), tl.num_programs(0)) * BLOCK
            first = tl.program_id(0) * size
            end = tl.minimum(first + size, num_tokens)
            if (flags & _PENALTIES) > 0:
                num_later = 0  # rows of the same draft after this row
                num_after = tl.num_programs(1) - 1 - tl.program_id(1)
                slots_ptr += row + 1
                while tl.load(slots_ptr + num_later, num_later < num_after, -1) == slot:
                    num_later += 1
                newest = (tl.load(newest_ptr + row) - first_token).to(tl.int32)
                is_draft = (num_later > 0) | (tl.load(slots_ptr - 2, row > 0, -1) == slot)
                is_given = position <= tl.load(parameters_ptr + _NUM_GIVEN)
                newest = tl.where(is_draft | is_given, -1, newest)
                occurrences_ptr += slot * num_tokens
                repetition = load_float(parameters_ptr + _REPETITION)
                frequency = load_float(parameters_ptr + _FREQUENCY)
                presence = load_float(parameters_ptr + _PRESENCE)
                for begin in range(first, end, BLOCK):
                    ids = begin + tl.arange(0, BLOCK)
                    _penalize(
                        logits_ptr, occurrences_ptr, repetition, frequency, presence, ids,
                        ids < num_tokens, newest, newest_ptr + row + 1, num_later, first_token,
                    )  # fmt: skip
            if (flags & _BIAS) > 0:
                tl.debug_barrier()  # other threads wrote the logits of the same tokens
                bias_row = bias_ptr + slot * (2 * _MAX_BIAS)
                _add_bias(logits_ptr, bias_row, num_bias, first_token, first, end)
            if (flags & _MASK) > 0:
                tl.debug_barrier()
                for begin in range(first, end, BLOCK):
                    ids = begin + tl.arange(0, BLOCK)
                    words_ptr = bitmask_ptr + slot * num_words
                    _forbid(logits_ptr, words_ptr, num_words, first_token, ids, ids < num_tokens)


@triton.jit
def _mask(
    logits_ptr, row_stride, slots_ptr, bitmask_ptr, num_words, num_tokens: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Mask a block of a row in each program; grid (blocks, num_rows)."""
    launch_dependents()
    wait()
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        words_ptr = bitmask_ptr + slot * num_words
        _forbid(logits_ptr + row * row_stride, words_ptr, num_words, 0, ids, ids < num_tokens)


@triton.jit
def _summarise(
    logits_ptr, row_stride, token_ids_ptr, run_max_ptr, run_sum_ptr, group_max_ptr, run_rank_ptr,
    vocab_size: tl.constexpr,
):  # fmt: skip
    """Store the largest logits, sums of relative weights and ranks; grid (runs, num_rows)."""
    launch_dependents()
    wait()
    run, row = tl.program_id(0), tl.program_id(1)
    at = row * tl.num_programs(0) + run
    logits_ptr += row.to(tl.int64) * row_stride
    largest, total = summarise_run(
        logits_ptr, run, 1.0, group_max_ptr + at * GROUPS_PER_RUN, vocab_size
    )
    tl.store(run_max_ptr + at, largest)
    tl.store(run_sum_ptr + at, total)
    ids = run * RUN + tl.arange(0, RUN)
    exists = ids < vocab_size
    logits = tl.load(logits_ptr + ids, exists, 0.0)  # these loads hit the L1 cache
    given = tl.load(logits_ptr + tl.load(token_ids_ptr + row))
    tl.store(run_rank_ptr + at, tl.sum((exists & (logits >= given)).to(tl.int32)))
