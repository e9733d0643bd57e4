"""Exchange between ranks over NVLink: a sharded vocabulary, and all-reduce of small messages.

A vocabulary is sharded over the ranks of a tensor-parallel group, at multiples of a run. Every rank
has a buffer with its logits and results of its runs. All buffers have the same layout, and peers
may read them: an element of another rank's shard is offset by the distance of the two ranks'
buffers.

All-reduce has one trip and no barrier. Every rank writes its message into the inboxes of all ranks,
and adds the messages in its own inbox. A word that has not arrived reads as `_MISSING`, which is
never sent: no other flag is needed (NCCL's low-latency protocol and TensorRT-LLM's "Lamport"
all-reduce work alike). A rank has three inboxes, used in turn. The first is read. The second, read
by the previous call, is cleared. Peers that are one call ahead may already write to the third.
Peers can't be two calls ahead, since they would need this rank's next message.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.argument_checks import check_contiguous, check_tensor
from penstock.kernels.triton_pdl import LAUNCH, launch_dependents, wait


class Shards(NamedTuple):
    """Shards of the vocabulary, as addressed by one rank."""

    runs_per_shard: int  # runs per rank; the last ranks may have fewer or none
    num_shards: int = 1
    rank: int = 0
    # int64 [num_shards]: distance from this rank's buffer to each rank's buffer, in units of 4
    # bytes
    distances: Tensor | None = None


def distances_to(addresses: Sequence[int], rank: int, device: torch.device) -> Tensor:
    """Return `Shards.distances` from the addresses of all ranks' buffers. Raises ValueError.

    addresses: as seen by this rank's device; kernels load 16 bytes at once.
    """
    if wrong := [address for address in addresses if address % 16]:
        raise ValueError(f"addresses: got {wrong[0]:#x}, expected a multiple of 16")
    distances = [(address - addresses[rank]) // 4 for address in addresses]
    return torch.tensor(distances, dtype=torch.int64, device=device)


@triton.jit
def shift(index, shards, per_run: tl.constexpr):
    """Return the offset from an index into a row of an array to the element at its rank.

    shards: distances, runs of a shard, number of shards. per_run: elements of the array per run.
    """
    moved = index * 0
    if shards[2] > 1:
        shard = tl.minimum(index // (shards[1] * per_run), shards[2] - 1)
        # Buffers are aligned to 16 bytes, so that loads are as wide as from a single buffer.
        distance = tl.multiple_of(tl.load(shards[0] + shard), 4)
        moved = distance - shard * (shards[1] * per_run)
    return moved


_BLOCK = tl.constexpr(512)  # words per program: four per thread, so that a store has 16 bytes
_TURNS = tl.constexpr(3)
_MISSING = tl.constexpr(-(2**31) + 2**15)  # two -0.0 of bfloat16 or float16; a -0.0 is sent as 0.0


def inbox_size(max_elements: int, num_ranks: int) -> int:
    """Return the int32 words of each rank's inboxes, for messages of up to `max_elements`."""
    capacity = -(-max_elements // (2 * _BLOCK.value)) * _BLOCK.value
    return int(_TURNS.value * num_ranks * capacity)


class PushAllReduce:
    """All-reduce of one rank. All ranks make the same calls, which CUDA graphs can capture."""

    def __init__(
        self, inbox: Tensor, addresses: Sequence[int], rank: int, max_elements: int
    ) -> None:
        """Clear this rank's inbox, int32 [inbox_size(...)]. Raises ValueError.

        addresses: addresses of all ranks' inboxes. A barrier of all ranks must follow before the
        first call.
        """
        check_tensor("inbox", inbox, (inbox_size(max_elements, len(addresses)),), torch.int32)
        self.max_elements = max_elements
        self._inbox = inbox.fill_(_MISSING.value)
        self._distances = distances_to(addresses, rank, inbox.device)
        self._rank = rank
        self._num_ranks = len(addresses)
        # maximum words of a message
        self._capacity = inbox.numel() // (_TURNS.value * len(addresses))
        # number of calls per program
        self._calls = inbox.new_zeros(self._capacity // _BLOCK.value)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Overwrite x with the sum over the ranks; x is contiguous, 16-bit, and has an even size.

        residual: tensor of x's shape, equal on all ranks, which is added to the sum. The sum is
        computed in float32, in the same order on all ranks, and rounded once. Raises ValueError.
        """
        check_tensor("x", x, tuple(x.shape), torch.bfloat16, torch.float16)
        check_contiguous("x", x)
        if residual is not None:
            check_tensor("residual", residual, tuple(x.shape), x.dtype)
            check_contiguous("residual", residual)
            residual = residual.view(-1).view(torch.int32)
        if x.numel() > self.max_elements or x.numel() % 2:
            raise ValueError(
                f"x: got {x.numel()} elements, expected an even number up to {self.max_elements}"
            )
        _push_and_sum[(triton.cdiv(x.numel(), 2 * _BLOCK.value),)](
            x.view(-1).view(torch.int32),
            residual,
            self._inbox,
            self._distances,
            self._calls,
            x.numel() // 2,
            self._capacity,
            self._rank,
            num_ranks=self._num_ranks,
            dtype=tl.float16 if x.dtype == torch.float16 else tl.bfloat16,
            num_warps=4,
            **LAUNCH,
        )
        return x


@triton.jit(do_not_specialize=["rank"])
def _push_and_sum(
    x_ptr, residual_ptr, inbox_ptr, distances_ptr, calls_ptr, num_words, capacity, rank,
    num_ranks: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Exchange _BLOCK words with the same program of every rank; grid (num_words / _BLOCK,)."""
    launch_dependents()
    wait()
    program = tl.program_id(0)
    call = tl.load(calls_ptr + program)
    lane = program * _BLOCK + tl.arange(0, _BLOCK)
    there = lane < num_words
    sent = tl.load(x_ptr + lane, there, other=0)
    sent = tl.where(sent == _MISSING, 0, sent)
    more = tl.zeros_like(sent)
    if residual_ptr is not None:
        more = tl.load(residual_ptr + lane, there, other=0)
    turn = call % _TURNS * num_ranks
    for peer in tl.static_range(num_ranks):
        distance = tl.multiple_of(tl.load(distances_ptr + peer), 4)
        tl.store(inbox_ptr + (distance + ((turn + rank) * capacity + lane)), sent, there)
    senders = tl.arange(0, num_ranks)[:, None] * capacity
    emptied = (call + 2) % _TURNS * num_ranks * capacity + senders + lane[None, :]
    tl.store(inbox_ptr + emptied, tl.full(emptied.shape, _MISSING, tl.int32))
    inbox_ptrs = inbox_ptr + (turn * capacity + senders + lane[None, :])
    words = tl.load(inbox_ptrs, there[None, :], other=0, volatile=True)
    while tl.max((words == _MISSING).to(tl.int32)) > 0:
        words = tl.load(inbox_ptrs, there[None, :], other=0, volatile=True)
    low = tl.sum(_low(words, dtype), 0) + _low(more, dtype)
    high = tl.sum(_high(words, dtype), 0) + _high(more, dtype)
    tl.store(x_ptr + lane, _bits(low, dtype) | (_bits(high, dtype) << 16), there)
    tl.store(calls_ptr + program, call + 1)


@triton.jit
def _low(words, dtype: tl.constexpr):
    """Return the first number of each word as float32."""
    if dtype == tl.bfloat16:
        return (words << 16).to(tl.float32, bitcast=True)
    else:
        return words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _high(words, dtype: tl.constexpr):
    if dtype == tl.bfloat16:
        return (words & -(2**16)).to(tl.float32, bitcast=True)
    else:
        return (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _bits(value, dtype: tl.constexpr):
    """Return the bits of the nearest number of this dtype as int32."""
    return value.to(dtype).to(tl.uint16, bitcast=True).to(tl.int32)
