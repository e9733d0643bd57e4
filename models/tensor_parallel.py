"""Ranks of a tensor-parallel group and their collectives."""

import atexit
import logging
import mmap
import os
import secrets
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.kernels.back_ends import CHOSEN, SharedRanks, is_deterministic
from penstock.protocol.transport.process import ProcessExit

log = logging.getLogger(__name__)
TIMEOUT = timedelta(seconds=120)  # maximum time to wait for another rank
# parts of gloo's and NCCL's error messages that report the exit of another rank
_HUNG_UP = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")
# Maximum size of a tensor that each rank pushes to every other rank, by size of the group. Two
# ranks push larger tensors in pieces, which measured fastest at every size. With more ranks,
# two-shot all-reduce sends less, because each rank adds its part and reads the other ranks' parts.
# The size from which two-shot is faster is an estimate.
PUSHED_BYTES = {2: 8 << 20, 4: 512 << 10, 8: 128 << 10}

TOKEN_BYTES = 16  # bytes of the name of memory shared by ranks on CPUs

T = TypeVar("T")
CPU = torch.device("cpu")


class GroupError(ConnectionError):
    """Loss of a rank of the group."""


class TensorParallel:
    """Rank of a tensor-parallel group; a single rank (size 1) exchanges nothing.

    GPUs of one node exchange through symmetric memory (torch.distributed._symmetric_memory): each
    rank reads and writes its peers' memory in kernels that a CUDA graph can hold. GPUs of several
    nodes, and GPUs of a node without peer access, use NCCL, which CUDA graphs can hold as well.
    CPUs of one machine exchange through shared memory, other CPUs through gloo.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, device: torch.device = CPU, spans_nodes: bool = False
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        # True if ranks can't read each other's memory: on several nodes, or without peer access
        self.spans_nodes = spans_nodes
        self._turns: Iterator[Tensor] = iter(())
        self._push: Any = None
        self._pushes_all = False  # True if tensors of any size can be pushed, in pieces
        # memory of ranks on CPUs of one machine, after `reserve`
        self.shared: SharedRanks | None = None

    @classmethod
    def join(
        cls,
        rendezvous: str,
        rank: int,
        size: int,
        device: torch.device = CPU,
        spans_nodes: bool = False,
    ) -> "TensorParallel":
        """Wait for the other ranks at `rendezvous`: tcp://host:port, or file:///path.

        A rendezvous file is removed. Raises GroupError.
        """
        group = cls(rank, size, device, spans_nodes)
        if size > 1:
            backend, device_id = ("nccl", device) if group.on_gpus else ("gloo", None)
            with group._exchange():
                dist.init_process_group(
                    backend, rendezvous, TIMEOUT, size, rank, device_id=device_id
                )
            if group.on_gpus and not spans_nodes:
                group.spans_nodes = not group.have_peer_access()
                if group.spans_nodes:
                    log.warning("GPUs lack peer access (`nvidia-smi topo -p2p rw`): NCCL is used")
            if rendezvous.startswith("file://"):
                with group._exchange():
                    dist.barrier()  # all ranks have read the file
                Path(rendezvous.removeprefix("file://")).unlink(missing_ok=True)
            # gloo's threads abort the interpreter unless they end before it
            atexit.register(dist.destroy_process_group)
        return group

    @property
    def on_gpus(self) -> bool:
        """True if the group has several ranks on GPUs."""
        return self.size > 1 and self.device.type == "cuda"

    def have_peer_access(self) -> bool:
        """Return True if all GPUs of this node's ranks can reach each other's memory.

        All ranks call this method and get the same result. Raises GroupError.
        """
        own = self.device.index
        devices = self._all_objects(own)
        reached = [
            other == own or torch.cuda.can_device_access_peer(own, other) for other in devices
        ]
        return all(self._all_objects(all(reached)))

    def _all_objects(self, own: T) -> list[T]:
        """Return every rank's object, in the order of the ranks."""
        objects: list[Any] = [None] * self.size
        with self._exchange():
            dist.all_gather_object(objects, own)
        return objects

    @property
    def shares_memory(self) -> bool:
        """True if the ranks have `symmetric` memory."""
        return self.on_gpus and not self.spans_nodes

    def reserve(self, num_elements: int, dtype: torch.dtype) -> None:
        """Allocate the memory for exchanges of up to `num_elements`. Raises GroupError."""
        if self.size > 1 and self.device.type == "cpu" and not self.spans_nodes:
            part_bytes = num_elements * dtype.itemsize
            self.shared = share_memory(self.rank, self.size, self._all_objects, part_bytes)
        if not self.shares_memory:
            return
        from penstock.kernels.triton_collectives import (  # only GPUs have Triton
            PushAllReduce,
            inbox_size,
        )

        # two-shot does not support float16, and adds in a different order
        self._pushes_all = self.size == 2 or dtype == torch.float16 or is_deterministic()
        if not self._pushes_all:
            self._turns = cycle([self.symmetric(num_elements, dtype)[0] for _ in range(2)])
        most = PUSHED_BYTES.get(self.size, 64 << 10) // dtype.itemsize
        inbox, addresses = self.symmetric(inbox_size(most, self.size), torch.int32)
        self._push = PushAllReduce(inbox, addresses, self.rank, most)
        self.barrier()

    def symmetric(self, num_elements: int, dtype: torch.dtype) -> tuple[Tensor, list[int]]:
        """Return memory that every rank can read, [num_elements], and all ranks' addresses.

        All ranks call this method with equal arguments. Raises GroupError.
        """
        import torch.distributed._symmetric_memory as symmetric_memory  # 0.3 s

        with self._exchange():
            memory = symmetric_memory.empty(num_elements, dtype=dtype, device=self.device)
            self._handle = symmetric_memory.rendezvous(memory, self._group.group_name)
        return memory, list(self._handle.buffer_ptrs)

    def barrier(self) -> None:
        """Make earlier writes of all ranks' GPUs visible to all ranks; the host does not wait."""
        self._handle.barrier(channel=1)

    def empty(self, num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor | None:
        """Return memory for a tensor to be reduced if special memory is required, otherwise None.

        The memory is valid for two more calls.
        """
        num_elements = num_rows * num_columns
        if not self.shares_memory or self._is_pushed(num_elements):
            return None
        buffer = next(self._turns)
        if buffer.dtype != dtype or num_elements > len(buffer):
            raise ValueError(
                f"tensor: got {num_elements} of {dtype}, expected {len(buffer)} of {buffer.dtype}"
            )
        return buffer[:num_elements].view(num_rows, num_columns)

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the sum over the ranks on all ranks; x is contiguous and may be overwritten.

        residual: tensor of x's shape, equal on all ranks, which is added to the sum. As part of one
        rank's x, the residual would be rounded more often.

        Between GPUs of a node, x must lie in memory from `empty`.
        """
        if self.shares_memory and self._is_pushed(x.numel()):
            self._push_pieces(x, residual)
            return x
        total = self._sum(x) if self.size > 1 else x
        return total if residual is None else torch.add(residual, total, out=total)

    def _sum(self, x: Tensor) -> Tensor:
        """Compute `all_reduce` for a tensor that is not pushed."""
        if self.shares_memory:
            with self._exchange():
                return torch.ops.symm_mem.two_shot_all_reduce_(  # type: ignore[no-any-return]
                    x, "sum", self._group.group_name
                )
        if self.on_gpus and not is_deterministic():
            with self._exchange():
                dist.all_reduce(x)
            return x
        # Tensors are added in the order of the ranks; gloo's and NCCL's order depends on the
        # tensor's size.
        first, *parts = self.all_gather(x)
        total = first.clone()
        for part in parts:
            total += part
        return total

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return every rank's x on all ranks, in the order of the ranks.

        The tensors may lie in memory that the next exchange overwrites.
        """
        if self.shared and x.nbytes <= self.shared.part_bytes:
            return self.shared.all_gather(x)
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with self._exchange():
            dist.all_gather(parts, x.contiguous())
        return parts

    def _is_pushed(self, num_elements: int) -> bool:
        return self._pushes_all or num_elements <= int(self._push.max_elements)

    def _push_pieces(self, x: Tensor, residual: Tensor | None) -> None:
        pieces = torch.split(x.view(-1), self._push.max_elements)
        if residual is None:
            for piece in pieces:
                self._push(piece)
            return
        residuals = torch.split(residual.view(-1), self._push.max_elements)
        for piece, more in zip(pieces, residuals, strict=True):
            self._push(piece, more)

    @property
    def _group(self) -> dist.ProcessGroup:
        return dist.distributed_c10d._get_default_group()

    def gather(self, x: Tensor) -> Tensor | None:
        """Return all ranks' x, joined in the last dimension, on rank 0; None on other ranks."""
        if self.size == 1:
            return x
        if self.shared and x.nbytes <= self.shared.part_bytes:
            gathered = self.shared.all_gather(x)
            return torch.cat(gathered, dim=-1) if self.rank == 0 else None
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        with self._exchange():
            dist.gather(x.contiguous(), parts)
        return None if parts is None else torch.cat(parts, dim=-1)

    def broadcast(self, x: Tensor) -> Tensor:
        """Return rank 0's x on all ranks; the x of other ranks is overwritten."""
        if self.shared and x.nbytes <= self.shared.part_bytes:
            return x.copy_(self.shared.all_gather(x)[0])
        if self.size > 1:
            with self._exchange():
                dist.broadcast(x, src=0)
        return x

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if "CUDA error" in str(error):  # error of an earlier kernel
                raise
            reason = "another rank has exited"  # gloo's message contains a path of its sources
            if not any(text in str(error) for text in _HUNG_UP):
                reason = str(error).partition("\n")[0]
            raise GroupError(f"rank {self.rank} of {self.size} lost its group: {reason}") from error


def share_memory(
    rank: int, size: int, all_objects: Callable[[Any], list[Any]], part_bytes: int
) -> SharedRanks | None:
    """Return memory shared by ranks on CPUs of a machine, or None on all if one can't use it.

    All ranks call this function. all_objects: returns every rank's object. The exit of a rank ends
    the memory for all ranks.
    """
    token = secrets.token_bytes(TOKEN_BYTES)
    try:
        if CHOSEN.rank_memory is None:
            raise OSError("code can't be compiled")
        num_bytes = CHOSEN.rank_memory.num_bytes(size, part_bytes)
        descriptor = _create(num_bytes, token) if rank == 0 else -1
        reason = ""
    except (AttributeError, OSError) as error:  # AttributeError: not on Linux
        descriptor, num_bytes, reason = -1, 0, str(error)
    places = all_objects((os.getpid(), descriptor, token, reason))
    pid, from_descriptor, wanted, _ = places[0]
    shared = None
    exits: list[ProcessExit] = []
    if CHOSEN.rank_memory and not any(place[-1] for place in places):
        try:
            memory = _open(f"/proc/{pid}/fd/{from_descriptor}", num_bytes, wanted)
            exits = [ProcessExit(other) for other, *_ in places if other != os.getpid()]
            shared = CHOSEN.rank_memory.view(memory, rank, size)
        except (OSError, ValueError) as error:
            reason = str(error)
    reasons = all_objects(reason)
    if descriptor >= 0:
        os.close(descriptor)
    if shared is None or any(reasons):
        log.warning("ranks share no memory: %s", "; ".join(filter(None, reasons)))
        return None
    threading.Thread(target=_watch, args=(exits, shared), daemon=True).start()
    return shared


def _create(num_bytes: int, token: bytes) -> int:
    """Return the descriptor of memory that is followed by the token."""
    descriptor = os.memfd_create("ranks")
    os.ftruncate(descriptor, num_bytes)
    os.pwrite(descriptor, token, num_bytes)
    return descriptor


def _open(path: str, num_bytes: int, token: bytes) -> Tensor:
    """Return the memory of rank 0. Raises OSError, or ValueError for another file."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        if os.pread(descriptor, TOKEN_BYTES, num_bytes) != token:
            raise ValueError("rank 0 is in another namespace of processes")
        return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def _watch(exits: list[ProcessExit], shared: SharedRanks) -> None:
    """Wait for the exit of another rank."""
    poller = select.poll()
    for process in exits:
        poller.register(process, select.POLLIN)
    poller.poll()
    shared.end()
