"""GPU memory: the step that takes the most stays within --gpu-memory-utilization.

The tests need the GPU for themselves: memory of other processes counts.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock.kernels.device import this_device
from penstock.protocol.config import Config
from penstock.services.worker.memory.kv_cache import worst_case_plan
from tests.engine import Engine
from tests.gpu.checkpoints import release, save_small

pytestmark = pytest.mark.gpu
GIB = 1 << 30
SLACK = GIB // 4
"""of the allocator, whose segments are larger than the tensors in them"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Return a checkpoint of two layers with the vocabulary of Qwen3."""
    save_small(tmp_path, num_hidden_layers=2)
    yield tmp_path
    release()


def used() -> int:
    """Return the bytes of the GPU that all processes use."""
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.parametrize("with_extras", [False, True])
def test_the_largest_step_fits(folder: Path, with_extras: bool) -> None:
    """Rows with penalties, bias, logprobs, a grammar: as many as a step may have."""
    real = torch.cuda.mem_get_info()[1]
    total = min(real, this_device().memory_bytes or real)
    limit = used() + 8 * GIB
    config = Config(
        model=str(folder),
        device="cuda",
        max_model_len=4096,
        max_num_seqs=256,
        max_num_batched_tokens=4096,
        gpu_memory_utilization=limit / total,
    )
    engine = Engine(config)
    plan = worst_case_plan(config, 4096, engine.runner.block_size, with_extras)
    engine.runner.launch(plan).output()
    torch.cuda.synchronize()
    print(f"used {used() / GIB:.2f} GiB of {limit / GIB:.2f}")
    assert limit - 2 * GIB < used() < limit + SLACK
