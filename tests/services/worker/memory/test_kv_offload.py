"""Copies between KV blocks and host slots, with the tensors of real KV caches."""

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from penstock.kernels.layouts.states import States
from penstock.kernels.matrices import FP8
from penstock.protocol.checkpoint import ModelError
from penstock.protocol.config import Config
from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.worker import CopyBlocks, WorkerAssignment
from penstock.services.worker.memory.kv_cache import KVMemory
from penstock.services.worker.memory.kv_offload import PAGE, KvOffload, make_offload, slot_bytes
from penstock.services.worker.memory.persistent_memory import PersistentMemory

NUM_BLOCKS = 6


def random_kv(dtype: torch.dtype, block_size: int = 3) -> KVMemory:
    """Return a KV cache of 2 layers and 2 heads, its bits random."""
    shape = (2, 2, NUM_BLOCKS, block_size, 2, 4)
    bits = torch.randint(0, 256, (torch.Size(shape).numel() * dtype.itemsize,), dtype=torch.uint8)
    scales = torch.rand(2, 2, NUM_BLOCKS, 2, block_size) if dtype == FP8 else None
    return KVMemory(bits.view(dtype).view(shape), scales)


def bits_of(kv: KVMemory, block: int) -> list[bytes]:
    return [one[:, :, block].contiguous().view(torch.uint8).numpy().tobytes() for one in kv.tensors]


def tier_of(kv: KVMemory, num_slots: int) -> KvOffload:
    host = torch.zeros(num_slots * slot_bytes(kv.tensors), dtype=torch.uint8)
    return KvOffload(kv.tensors, host, num_slots, memory_id=1)


def copies(blocking: list[int], overlapped: list[int]) -> CopyBlocks:
    return CopyBlocks(1, pack(blocking), pack(overlapped))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_a_block_comes_back_bit_by_bit(dtype: torch.dtype) -> None:
    kv = random_kv(dtype)
    old = [bits_of(kv, block) for block in range(NUM_BLOCKS)]
    assert old[1] != old[2]
    tier = tier_of(kv, 3)
    tier.copy(copies([1, 2, 2, 0], [4, 1]))
    tier.before_step()
    for one in kv.tensors:
        one[:, :, [1, 2, 4]] = 0
    tier.copy(copies([5, -3, 1, -1], [0, -2]))
    new = [bits_of(kv, block) for block in range(NUM_BLOCKS)]
    assert new[5] == old[1]
    assert new[1] == old[2]
    assert new[0] == old[4]
    assert new[3] == old[3]


def test_copies_run_in_order() -> None:
    """A slot that is read is overwritten after that."""
    kv = random_kv(torch.float32)
    old = [bits_of(kv, block) for block in range(NUM_BLOCKS)]
    tier_of(kv, 1).copy(copies([0, 0, 1, -1, 2, 0, 3, -1], [4, 0, 5, -1]))
    new = [bits_of(kv, block) for block in range(NUM_BLOCKS)]
    assert new == [old[0], old[0], old[2], old[2], old[4], old[4]]


def random_states(num_blocks: int = 3) -> States:
    """Return state blocks of two layers that are larger than a slot, with their positions."""
    shapes = [[(1500,), (3, 8)], [(40, 20)]]
    layers = [[torch.rand(num_blocks + 1, *shape) for shape in layer] for layer in shapes]
    positions = torch.arange(2 * (num_blocks + 1), dtype=torch.int32).view(-1, 2)
    return States(positions, layers)


def state_of(states: States, block: int) -> list[list[float]]:
    tensors = [tensor for layer in states.layers for tensor in layer]
    return [tensor[block].flatten().tolist() for tensor in (*tensors, states.positions)]


def test_a_state_block_comes_back_in_pieces() -> None:
    """Also into another block; other blocks stay as they are."""
    kv, states = random_kv(torch.float32), random_states()
    host = torch.zeros(8 * slot_bytes(kv.tensors), dtype=torch.uint8)
    tier = KvOffload(kv.tensors, host, 8, memory_id=1, states=states)
    assert tier.num_pieces == 3  # 2326 words, in slots of 1024
    old = [state_of(states, block) for block in range(4)]
    blocks = [bits_of(kv, block) for block in range(NUM_BLOCKS)]
    tier.copy(copies([-4, 6, -5, 1, -6, 3, 2, 0], []))  # block 1
    for tensor in (*states.layers[0], *states.layers[1], states.positions):
        tensor[1] = 0
    tier.copy(copies([-7, -7, -8, -2], [-9, -4, 5, -1]))
    assert [state_of(states, block) for block in (0, 2, 3)] == [old[0], old[1], old[3]]
    assert [bits_of(kv, block) for block in range(NUM_BLOCKS)] == [*blocks[:5], blocks[2]]


def test_slots_are_whole_pages() -> None:
    """Parts of the host's memory are pinned one by one, and pinned memory consists of pages."""
    for dtype in (torch.float32, FP8):
        assert slot_bytes(random_kv(dtype).tensors) % PAGE == 0


def folder_of(config: Config) -> Path:
    """Return the folder of the files of a worker."""
    kv = random_kv(torch.float32).tensors
    assignment = WorkerAssignment(1, "1", 0, 1, "")
    memory = PersistentMemory(config, assignment, torch.device("cpu"), None)
    folder = make_offload(config, memory, kv).folder
    assert folder
    return folder._disk.folder


BOTH = Config(kv_offload_gib=0.001, kv_offload_folder="folder")


def test_deterministic_steps_do_not_use_files_of_others() -> None:
    """Their bits must not depend on kernels that are not deterministic."""
    assert folder_of(BOTH) == folder_of(replace(BOTH, num_blocks=7))
    assert folder_of(BOTH) != folder_of(replace(BOTH, deterministic=True))


@pytest.mark.parametrize("field", ["kv_offload_gib", "kv_offload_folder_gib"])
def test_memory_and_folder_have_room_for_a_block(field: str) -> None:
    with pytest.raises(
        ModelError, match=f"--{field}: got 1e-08, expected 3.8e-06".replace("_", "-")
    ):
        folder_of(replace(BOTH, **{field: 1e-8}))
