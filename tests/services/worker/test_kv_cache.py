"""The size of the KV cache."""

from pathlib import Path

import pytest

from penstock.protocol.checkpoint import read_model_config
from penstock.protocol.config import Config
from penstock.services.worker.kv_cache import allocate_kv_cache

BLOCK_BYTES = 2 * 2 * 16 * 4 * 16 * 4
"""keys and values, layers, block_size, KV heads, head_dim, bytes of a float32"""


@pytest.mark.parametrize(
    ("options", "tp_size", "shape"),
    [
        ({"num_blocks": 7}, 1, (2, 2, 7, 16, 4, 16)),
        ({"num_blocks": 7, "block_size": 256}, 4, (2, 2, 7, 256, 1, 16)),
        ({"kv_cache_gib": 10.5 * BLOCK_BYTES / 2**30}, 1, (2, 2, 10, 16, 4, 16)),
        ({"kv_cache_gib": 10.5 * BLOCK_BYTES / 2**30}, 2, (2, 2, 21, 16, 2, 16)),
        ({"kv_cache_gib": 1e-9}, 1, (2, 2, 1, 16, 4, 16)),
    ],
)
def test_holds_as_many_blocks_as_asked_for(
    folder: Path, options: dict[str, float], tp_size: int, shape: tuple[int, ...]
) -> None:
    config = Config(**options)  # type: ignore[arg-type]
    kv_cache = allocate_kv_cache(config, read_model_config(folder), tp_size)
    assert tuple(kv_cache.shape) == shape
    assert not kv_cache.any()
