"""Size and allocation of the KV cache, and the worst-case steps that limit its size."""

import logging
from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.device import this_device
from penstock.kernels.layouts.kv_cache import KVCache
from penstock.kernels.matrices import FP8
from penstock.models.architecture import Architecture, Ranks
from penstock.protocol.checkpoint import ModelError
from penstock.protocol.config import Config
from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.plan import MAX_BLOCKS, BatchPlan, RowAdded, RowExtras
from penstock.protocol.messages.structured import StructuredOutputs

log = logging.getLogger(__name__)
# memory of a standby worker's CUDA context, with kernels, cuBLAS and NCCL
STANDBY_BYTES = 1 << 30


# sampling parameters of the worst-case steps
SAMPLING = {"temperature": 1.0, "top_k": 20, "top_p": 0.95}
PENALTIES = {"presence_penalty": 1.0, "frequency_penalty": 1.0, "repetition_penalty": 1.5}


class KVMemory(NamedTuple):
    """The KV cache of one rank: [layers with attention, 2, num_blocks, ...]."""

    values: Tensor  # [..., block_size, num_kv_heads, head_dim]
    scales: Tensor | None  # for FP8: float32 [..., num_kv_heads, block_size]

    @property
    def layers(self) -> list[KVCache]:
        if self.scales is None:
            return [KVCache(*layer) for layer in self.values]
        pairs = zip(self.values, self.scales, strict=True)
        return [KVCache(k, v, (ks, vs)) for (k, v), (ks, vs) in pairs]

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in self if tensor is not None]


class KVLayout(NamedTuple):
    """The layout of a rank's KV blocks."""

    architecture: Architecture
    tp_size: int
    block_size: int
    dtype: torch.dtype

    @property
    def block_shape(self) -> tuple[int, int, int]:
        """Shape of a block's keys in a layer: (block_size, a rank's KV heads, head_dim)."""
        _, kv_heads = self.architecture.heads
        num_kv_heads = kv_heads.units_of_rank(Ranks(self.tp_size))
        return self.block_size, num_kv_heads, kv_heads.unit_size

    @property
    def block_bytes(self) -> int:
        """Size of a block in bytes, in all layers and including scales."""
        scale_bytes = torch.float32.itemsize if self.dtype == FP8 else 0
        ranks, number_bytes = Ranks(self.tp_size), self.dtype.itemsize
        return self.block_size * self.architecture.token_bytes(ranks, number_bytes, scale_bytes)

    def num_fitting_blocks(self, num_bytes: float) -> int:
        """Return the number of blocks that fit into `num_bytes`. Raises ModelError if none fits."""
        if num_bytes < self.block_bytes:
            raise ModelError(
                f"KV cache: got {num_bytes / 2**30:.2f} GiB, expected "
                f"{self.block_bytes / 2**30:.2f} or more for one block; raise "
                "--gpu-memory-utilization or --kv-cache-gib, or use more GPUs"
            )
        return min(int(num_bytes / self.block_bytes), MAX_BLOCKS)

    def allocate(self, num_blocks: int, memory: Tensor) -> KVMemory:
        """Return a rank's KV cache in `memory`, uint8, zeros or that of a last worker."""
        gib = num_blocks * self.block_bytes / 2**30
        log.info("KV cache: %d blocks of %d tokens, %.2f GiB", num_blocks, self.block_size, gib)
        block_size, num_kv_heads, head_dim = self.block_shape
        size = (len(self.architecture.kv_layers), 2, num_blocks)
        shape = *size, block_size, num_kv_heads, head_dim
        begin, end = prod(shape) * self.dtype.itemsize, num_blocks * self.block_bytes
        kv = memory[:begin].view(self.dtype).view(shape)
        if self.dtype != FP8:
            return KVMemory(kv, None)
        scales = memory[begin:end].view(torch.float32)
        return KVMemory(kv, scales.view(*size, num_kv_heads, block_size))


def zeros(num_bytes: int, device: torch.device) -> Tensor:
    """Return memory of zeros for a KV cache, uint8. Raises ModelError."""
    if device.type == "cpu":
        try:  # numpy's zeros take memory only when they are written
            zeros = np.zeros(num_bytes, "u1")
        except MemoryError as error:
            raise ModelError(f"KV cache: {error}; lower --kv-cache-gib or --num-blocks") from error
        return torch.from_numpy(zeros)
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def free_gpu_bytes(
    worst_cases: Sequence[Callable[[], object]],
    utilization: float,
    device: torch.device,
    *,
    trial_bytes: int,
    has_standby: bool,
) -> int:
    """Return the bytes that remain for the KV cache on a GPU.

    worst_cases: functions that run the largest steps. The first is the largest with a CUDA graph,
    since graphs have their own memory; a single token if there are no graphs.
    utilization: fraction of the GPU's memory that all processes together may use.
    trial_bytes: size of the KV cache and states with which these steps run.
    has_standby: whether a standby worker will share weights and KV cache.
    """
    before = torch.cuda.memory_allocated(device)
    peaks = []
    for worst_case in worst_cases:
        torch.cuda.reset_peak_memory_stats(device)
        worst_case()
        torch.cuda.synchronize(device)
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    used = total - free - trial_bytes
    log.info("the largest step takes %.2f GiB in addition to the weights", max(peaks) / 2**30)
    # a peak for the CUDA graphs' pool, and a peak for eager steps and the logits processor
    steps = peaks[0] + max(peaks)
    # torch has not allocated the weights: the rest of `before` are the steps' buffers
    standby = has_standby * (STANDBY_BYTES + before - trial_bytes + steps)
    if has_standby:
        log.info("the standby worker has %.2f GiB", standby / 2**30)
    size = this_device().memory_bytes or total
    return int(utilization * min(size, total) - used - steps - standby)


def worst_case_plan(
    config: Config, max_model_len: int, block_size: int, with_extras: bool = False
) -> BatchPlan:
    """Return a plan with the maximum number of tokens and rows in a step, all in block 0.

    with_extras: give all rows all extras, and a single row most of the tokens.
    """
    num_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
    lengths = [1 if with_extras else config.max_num_batched_tokens // num_rows] * num_rows
    lengths[0] += config.max_num_batched_tokens - sum(lengths)
    lengths = [min(length, max_model_len) for length in lengths]
    added = [
        RowAdded(
            slot=slot,
            token_ids=bytes(4 * length),
            block_ids=bytes(4 * -(-length // block_size)),
            num_computed_tokens=0,
            sampling=SAMPLING | (PENALTIES if with_extras else {}),
            seed=slot,
            extras=_all_extras(length) if with_extras else None,
            num_prompt_tokens=length,
        )
        for slot, length in enumerate(lengths)
    ]
    chunks = pack(number for pair in enumerate(lengths) for number in pair)
    return BatchPlan(epoch=0, step=0, added=added, chunks=chunks)


def _all_extras(num_prompt_tokens: int) -> RowExtras:
    return RowExtras(
        num_prompt_tokens,
        logit_bias={0: 1.0},
        num_logprobs=20,
        num_prompt_logprobs=20,
        structured_outputs=StructuredOutputs(regex="a*"),
        bad_words=[[1], [2, 3]],
    )
