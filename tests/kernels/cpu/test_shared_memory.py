"""Ranks that share memory, as threads: parts reach all ranks, and none waits for a lost one."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from penstock.kernels.cpu.shared_memory import SharedMemory, shared_bytes

T = TypeVar("T")
NUM_RANKS, PART_BYTES, ROUNDS = 3, 4096, 300


def make_ranks() -> list[SharedMemory]:
    memory = torch.zeros(shared_bytes(NUM_RANKS, PART_BYTES), dtype=torch.uint8)
    return [SharedMemory(memory, rank, NUM_RANKS) for rank in range(NUM_RANKS)]


def on_all(ranks: list[SharedMemory], call: Callable[[int, SharedMemory], T]) -> list[T]:
    with ThreadPoolExecutor(NUM_RANKS) as threads:
        return list(threads.map(call, range(NUM_RANKS), ranks))


def part(rank: int, turn: int) -> Tensor:
    return torch.full((1 + turn % 7, 5), 1000.0 * rank + turn)


def exchange(rank: int, memory: SharedMemory, first: int = 0) -> int:
    for turn in range(first, first + ROUNDS):
        for other, found in enumerate(memory.all_gather(part(rank, turn))):
            assert torch.equal(found, part(other, turn))
    return first + ROUNDS


def test_every_rank_has_the_parts_of_all_in_each_turn() -> None:
    assert on_all(make_ranks(), exchange) == [ROUNDS] * NUM_RANKS


def test_an_end_wakes_those_that_wait_and_those_that_come() -> None:
    ranks = make_ranks()
    on_all(ranks, exchange)

    def lose(rank: int, memory: SharedMemory) -> str:
        if rank == 2:
            memory.end()
            return ""
        with pytest.raises(ConnectionError) as failed:
            memory.all_gather(part(rank, 0))
        return str(failed.value)

    text = "rank %d of 3 lost its group: another rank has exited"
    assert on_all(ranks, lose) == [text % 0, text % 1, ""]
    assert on_all(ranks, lose) == [text % 0, text % 1, ""]
