"""Memory that ranks on CPUs of one machine share, in place of sockets between them."""

import logging
import mmap
import os
import secrets
import select
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.back_ends import CHOSEN, SharedRanks
from penstock.protocol.transport.process import ProcessExit

log = logging.getLogger(__name__)
TOKEN_BYTES = 16


def share_memory(
    rank: int, size: int, all_objects: Callable[[Any], list[Any]], part_bytes: int
) -> SharedRanks | None:
    """Return memory of all ranks, or None for all where one can't use it. All ranks call it.

    all_objects: returns every rank's object. The memory ends for all with the exit of a rank.
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
    """Return the descriptor of memory that has the token after its end."""
    descriptor = os.memfd_create("ranks")
    os.ftruncate(descriptor, num_bytes)
    os.pwrite(descriptor, token, num_bytes)
    return descriptor


def _open(path: str, num_bytes: int, token: bytes) -> Tensor:
    """Return the memory of rank 0. Raises OSError, ValueError if it is another file."""
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
    for one in exits:
        poller.register(one, select.POLLIN)
    poller.poll()
    shared.end()
