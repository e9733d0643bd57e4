"""The memory of keys and values."""

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.attention.types import KVCache
from penstock.kernels.quantize.types import FP8
from penstock.protocol.checkpoint import ModelConfig, ModelError
from penstock.protocol.messages.plan import MAX_BLOCKS

log = logging.getLogger(__name__)


def kv_block_shape(model: ModelConfig, tp_size: int, block_size: int) -> tuple[int, int, int]:
    """Keys (or values) of one block in one layer: (block_size, KV heads of a rank, head_dim)."""
    return block_size, max(1, model.num_key_value_heads // tp_size), model.head_dim


def num_fitting_blocks(
    num_bytes: float, model: ModelConfig, tp_size: int, block_size: int, dtype: torch.dtype
) -> int:
    """How many blocks fit into `num_bytes`. Raises ModelError if none does."""
    shape = kv_block_shape(model, tp_size, block_size)
    block_bytes = 2 * model.num_hidden_layers * _num_bytes(shape, dtype)
    if num_bytes < block_bytes:
        raise ModelError(
            f"{num_bytes / 2**30:.2f} GiB are left for the KV cache; one block takes "
            f"{block_bytes / 2**30:.2f}"
        )
    return min(int(num_bytes / block_bytes), MAX_BLOCKS)


def allocate_kv_cache(
    model: ModelConfig,
    tp_size: int,
    block_size: int,
    num_blocks: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[KVCache]:
    """One rank's KV cache, of each layer: zeros."""
    shape = kv_block_shape(model, tp_size, block_size)
    size = (model.num_hidden_layers, 2, num_blocks)
    log.info(
        "KV cache: %d blocks of %d tokens, %.2f GiB",
        num_blocks,
        block_size,
        torch.Size(size).numel() * _num_bytes(shape, dtype) / 2**30,
    )
    kv = _zeros((*size, *shape), dtype, device)
    if dtype != FP8:
        return [KVCache(*layer) for layer in kv]
    scales = _zeros((*size, shape[1], shape[0]), torch.float32, device)
    return [KVCache(k, v, (ks, vs)) for (k, v), (ks, vs) in zip(kv, scales, strict=True)]


def _num_bytes(shape: tuple[int, int, int], dtype: torch.dtype) -> int:
    """Of the keys (or values) of a block in one layer, with the scales of those in 8 bits."""
    block_size, num_kv_heads, head_dim = shape
    head_bytes = head_dim * dtype.itemsize + (torch.float32.itemsize if dtype == FP8 else 0)
    return block_size * num_kv_heads * head_bytes


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if device.type == "cpu":
        # numpy's zeros are pages that the kernel makes when they are written to: a start is free
        return torch.from_numpy(np.zeros(num_bytes, "u1")).view(dtype).view(shape)
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device).view(dtype).view(shape)


def free_gpu_bytes(
    worst_cases: Sequence[Callable[[], object]], utilization: float, device: torch.device
) -> int:
    """What a GPU has left for the KV cache beside everything else that is on it.

    worst_cases run the largest step: of rows that want no more than a token, which graphs have
    memory of their own for, then of rows that ask for all there is. utilization: share of the GPU's
    memory that may be used, by whatever process.
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
    log.info("the largest step takes %.2f GiB beside the weights", max(peaks) / 2**30)
    # once for the CUDA graphs' pool, once for steps that run eagerly or behind a graph
    return int(free - (1 - utilization) * total - peaks[0] - max(peaks))
