"""The size of the KV cache."""

from pathlib import Path

import pytest
import torch

from penstock.protocol.checkpoint import ModelError, read_model_config
from penstock.services.worker.kv_cache import allocate_kv_cache, num_fitting_blocks

BLOCK_BYTES = 2 * 2 * 16 * 4 * 16 * 4
"""keys and values, layers, block_size, KV heads, head_dim, bytes of a float32"""


@pytest.mark.parametrize(
    ("block_size", "tp_size", "shape"),
    [(16, 1, (2, 2, 7, 16, 4, 16)), (256, 4, (2, 2, 7, 256, 1, 16))],
)
def test_is_as_large_as_asked_for(
    folder: Path, block_size: int, tp_size: int, shape: tuple[int, ...]
) -> None:
    model, cpu = read_model_config(folder), torch.device("cpu")
    for dtype in (torch.float32, torch.bfloat16):
        kv_cache = allocate_kv_cache(model, tp_size, block_size, 7, dtype, cpu)
        assert tuple(kv_cache.shape) == shape
        assert kv_cache.dtype == dtype
        assert not kv_cache.any()


@pytest.mark.parametrize(
    ("tp_size", "dtype", "num_blocks"),
    [(1, torch.float32, 10), (2, torch.float32, 21), (1, torch.bfloat16, 21)],
)
def test_takes_as_many_blocks_as_fit(
    folder: Path, tp_size: int, dtype: torch.dtype, num_blocks: int
) -> None:
    model = read_model_config(folder)
    assert num_fitting_blocks(10.5 * BLOCK_BYTES, model, tp_size, 16, dtype) == num_blocks


def test_refuses_what_holds_no_block(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"0\.00 GiB are left for the KV cache; one block takes"):
        num_fitting_blocks(BLOCK_BYTES - 1, read_model_config(folder), 1, 16, torch.float32)
