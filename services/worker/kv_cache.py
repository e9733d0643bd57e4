"""The memory of keys and values."""

import logging

import numpy as np
import torch
from torch import Tensor

from penstock.protocol.checkpoint import ModelConfig
from penstock.protocol.config import Config
from penstock.protocol.plan import MAX_BLOCKS

log = logging.getLogger(__name__)


def allocate_kv_cache(config: Config, model: ModelConfig, tp_size: int) -> Tensor:
    """One rank's KV cache, of `num_blocks` blocks or as many as `kv_cache_gib` holds.

    Zeros, [num_layers, 2, num_blocks, block_size, KV heads of this rank, head_dim].
    """
    num_kv_heads = model.num_key_value_heads // tp_size
    block_shape = (config.block_size, num_kv_heads, model.head_dim)
    num_tensors = 2 * model.num_hidden_layers
    block_bytes = num_tensors * torch.Size(block_shape).numel() * torch.float32.itemsize
    num_fitting = int(config.kv_cache_gib * 2**30 / block_bytes)
    num_blocks = config.num_blocks or max(1, min(num_fitting, MAX_BLOCKS))
    log.info(
        "KV cache: %d blocks of %d tokens, %.2f GiB",
        num_blocks,
        config.block_size,
        num_blocks * block_bytes / 2**30,
    )
    # numpy's zeros are pages that the kernel makes when they are written to: a start costs nothing
    return torch.from_numpy(np.zeros((model.num_hidden_layers, 2, num_blocks, *block_shape), "f4"))
