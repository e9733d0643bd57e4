"""Memory that the ranks of a group on one machine share, with a barrier for all ranks.

Threads of one process use such a barrier as well. A waiting thread polls memory for some
microseconds. Then it sleeps until the last thread arrives. On Linux it sleeps in a futex; elsewhere
it yields its core between reads.
"""

import platform
import sys

import torch
from llvmlite import ir
from torch import Tensor

from penstock.kernels.cpu.compiler import load
from penstock.kernels.cpu.values import INT32, INT64, POINTER, Kernel, Pointer, Value, emitted

# words of a barrier, each in a separate cache line; BROKEN: positive after the loss of a process;
# HALVES: number of halves of layers that the threads have computed
ARRIVED, GENERATION, SLEEPERS, BROKEN, HALVES = 0, 8, 16, 24, 32
WORDS = 40
SPINS = 10_000  # reads before a thread sleeps, about 20 µs
WAIT, WAKE = 0, 1  # operations of futex(2)
FUTEX = {"x86_64": 202, "aarch64": 98}  # number of the system call by architecture


def futex_number() -> int:
    """Return the number of Linux's futex(2) on this machine, or 0 if unknown."""
    return FUTEX.get(platform.machine(), 0) if sys.platform == "linux" else 0


class _System:
    """System calls from emitted code."""

    def __init__(self, k: Kernel, words: Pointer) -> None:
        self._builder, self._address = k.builder, (words + GENERATION).raw
        module = k.builder.module
        self._number = futex_number()
        name = "syscall" if self._number else "sched_yield"
        kind = ir.FunctionType(INT64 if self._number else INT32, [], var_arg=bool(self._number))
        self._function = module.globals.get(name) or ir.Function(module, kind, name)

    def sleep(self, generation: Value) -> None:
        """Wait for a wake-up after this generation; it may return early."""
        if self._number:
            null = ir.Constant(POINTER, None)
            self._call(INT32(WAIT), generation.truncate().raw, null)
        else:
            self._builder.call(self._function, [])

    def wake_all(self) -> None:
        if self._number:
            self._call(INT32(WAKE), INT32(2**31 - 1))

    def _call(self, *arguments: object) -> None:
        number = INT64(self._number)
        self._builder.call(self._function, [number, self._address, *arguments])


def emit_barrier(k: Kernel) -> None:
    """Wait for `size` threads, or until the barrier is broken.

    Arguments: the barrier's words, size.
    """
    words, size = k.arguments
    with k.when(size > 1):
        b = k.builder
        ticket = add_atomically(k, words + ARRIVED, 1)
        wanted = (ticket // size + 1) * size
        is_last = (ticket + 1).compare("==", wanted)
        system = _System(k, words)
        with k.when(is_last):
            _next_generation(k, words, system)
        spins = k.variable(k.integer(0))
        loop, done = b.append_basic_block(), b.append_basic_block()
        b.branch(loop)
        b.position_at_end(loop)
        generation = _load(k, words + GENERATION)
        spins.value = spins.value + 1
        is_done = (_load(k, words + ARRIVED) >= wanted) | (_load(k, words + BROKEN) > 0)
        with k.when((spins.value > SPINS) & is_done.compare("==", 0)):
            add_atomically(k, words + SLEEPERS, 1)
            system.sleep(generation)
            add_atomically(k, words + SLEEPERS, -1)
        b.cbranch(is_done.raw, done, loop)
        b.position_at_end(done)


def build_ranks() -> ir.Module:
    """Return the functions `meet` and `end`; meet takes a barrier's words and a number of ranks."""
    module = ir.Module("ranks")
    emitted(module, "meet", "i64 int", emit_barrier, public=True)
    emitted(module, "end", "i64", emit_end, public=True)
    return module


def emit_end(k: Kernel) -> None:
    """Make all current and future waits return. Argument: the barrier's words."""
    (words,) = k.arguments
    add_atomically(k, words + BROKEN, 1)
    _next_generation(k, words, _System(k, words))


def _next_generation(k: Kernel, words: Pointer, system: _System) -> None:
    add_atomically(k, words + GENERATION, 1)
    with k.when(_load(k, words + SLEEPERS) > 0):
        system.wake_all()


def add_atomically(k: Kernel, place: Pointer, number: int) -> Value:
    """Add atomically, and return the previous value."""
    return Value(k.builder, k.builder.atomic_rmw("add", place.raw, INT64(number), "seq_cst"))


def _load(k: Kernel, place: Pointer) -> Value:
    return Value(k.builder, k.builder.load_atomic(place.raw, "seq_cst", 8, typ=INT64))


HEADER = 8 * WORDS
# A rank that writes its part of a turn has met the other ranks after they read their parts of the
# previous turn, but not after they read their parts of this turn.
TURNS = 2


def shared_bytes(num_ranks: int, part_bytes: int) -> int:
    """Return the bytes of memory in which each rank has parts of this size."""
    return HEADER + TURNS * num_ranks * part_bytes


class SharedMemory:
    """One rank's view: a part for each rank, in turns. All ranks make the same calls."""

    def __init__(self, memory: Tensor, rank: int, num_ranks: int) -> None:
        """Use memory of `shared_bytes`, uint8, initially zeros. Raises OSError."""
        self._rank, self._num_ranks, self._turn = rank, num_ranks, 0
        self._words = memory[:HEADER].view(torch.int64)
        self._parts = memory[HEADER:].view(TURNS, num_ranks, -1)
        self.part_bytes: int = self._parts.shape[2]
        self._library = load(lambda _: str(build_ranks()), "ranks")
        self._meet = self._library.function("meet", 2)
        self._end = self._library.function("end", 1)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return every rank's x, of up to `part_bytes`; the views are valid until the next call.

        Raises ConnectionError if a rank has exited.
        """
        turn, self._turn = self._turn, (self._turn + 1) % TURNS
        parts = [part[: x.nbytes].view(x.dtype).view(x.shape) for part in self._parts[turn]]
        parts[self._rank].copy_(x)
        self._meet(self._words.data_ptr(), self._num_ranks)
        self.check()
        return parts

    def fields(self, num_turns: int) -> dict[str, int]:
        """Return the fields of StepFields for a call with this number of turns."""
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
        """Let the calls of every rank fail from now on, including calls that already wait."""
        self._end(self._words.data_ptr())

    def check(self) -> None:
        """Raise ConnectionError after `end`."""
        if self._words[BROKEN]:
            place = f"rank {self._rank} of {self._num_ranks}"
            raise ConnectionError(f"{place} lost its group: another rank has exited")
