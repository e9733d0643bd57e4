"""Memory that the ranks of a group on one machine share, with a barrier at which they meet."""

import torch
from torch import Tensor

from penstock.kernels.cpu.compiler import load
from penstock.kernels.cpu.llvm_barrier import BROKEN, WORDS, build_ranks

HEADER = 8 * WORDS
# A rank that writes its part of a turn has met the others after they read their parts of the last
# one, but not of this one.
TURNS = 2


def shared_bytes(num_ranks: int, part_bytes: int) -> int:
    """Return the bytes of memory in which each rank has parts of this size."""
    return HEADER + TURNS * num_ranks * part_bytes


class SharedMemory:
    """One rank's view: a part for each rank, in turns. All ranks make the same calls."""

    def __init__(self, memory: Tensor, rank: int, num_ranks: int) -> None:
        """Use memory of `shared_bytes`, uint8, which begins with zeros. Raises OSError."""
        self._rank, self._num_ranks, self._turn = rank, num_ranks, 0
        self._words = memory[:HEADER].view(torch.int64)
        self._parts = memory[HEADER:].view(TURNS, num_ranks, -1)
        self.part_bytes: int = self._parts.shape[2]
        self._library = load(lambda _: str(build_ranks()), "ranks")
        self._meet = self._library.function("meet", 2)
        self._end = self._library.function("end", 1)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return every rank's x, up to `part_bytes`; views that are valid until the next call.

        Raises ConnectionError if a rank has exited.
        """
        turn, self._turn = self._turn, (self._turn + 1) % TURNS
        parts = [part[: x.nbytes].view(x.dtype).view(x.shape) for part in self._parts[turn]]
        parts[self._rank].copy_(x)
        self._meet(self._words.data_ptr(), self._num_ranks)
        self.check()
        return parts

    def fields(self, num_turns: int) -> dict[str, int]:
        """Return the fields of StepFields for a call that takes this number of turns."""
        turn, self._turn = self._turn, (self._turn + num_turns) % TURNS
        return {
            "num_ranks": self._num_ranks,
            "rank": self._rank,
            "ranks_barrier": self._words.data_ptr(),
            "parts": self._parts.data_ptr(),
            "part_size": self.part_bytes // 4,
            "turn": turn,
        }

    def end(self) -> None:
        """Let every rank's calls fail from now on, also those that wait."""
        self._end(self._words.data_ptr())

    def check(self) -> None:
        """Raise ConnectionError after `end`."""
        if self._words[BROKEN]:
            place = f"rank {self._rank} of {self._num_ranks}"
            raise ConnectionError(f"{place} lost its group: another rank has exited")
