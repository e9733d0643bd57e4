"""The persistent memory of a rank, which outlives its worker: weights and KV cache.

The supervisor keeps the descriptors. Weights are passed on when they are whole, so that what a
killed worker had loaded in part is never used. The next worker of this rank uses what was made for
the same checkpoint, configuration and device.
"""

import hashlib
import logging
import mmap
import os
import secrets
from collections.abc import Callable, Iterable
from copy import copy
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from penstock.models.model import Model
from penstock.models.parallel import without_memory
from penstock.protocol.config import Config
from penstock.protocol.messages.worker import WorkerAssignment
from penstock.protocol.transport.socket_pairs import MemoryClient, create_memory
from penstock.services.worker.hardware import INTEGER_BITS

log = logging.getLogger(__name__)
ALIGNMENT = 512  # bytes


class Placed(msgspec.Struct, array_like=True):
    """The place of a tensor in memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int  # bytes


class Manifest(msgspec.Struct, array_like=True):
    """The contents of persistent memory."""

    digest: bytes  # of everything that must be equal for a worker to use it
    number: int  # random: no other memory has it
    num_bytes: int
    num_blocks: int = 0  # of a KV cache
    tensors: list[Placed] = []


class Region(NamedTuple):
    """Memory, uint8 [num_bytes], and its manifest."""

    memory: Tensor
    manifest: Manifest

    def view(self, begin: int, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        shape = torch.Size(shape)
        num_bytes = shape.numel() * dtype.itemsize
        return self.memory[begin : begin + num_bytes].view(dtype).view(shape)


def _version_of(path: Path) -> tuple[int, ...]:
    """Return what changes with a file's contents, also if its size and time are set back."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


class SharedMemoryError(ConnectionError):
    """Memory of a running worker that a standby worker can't share, or can't take over."""


class PersistentMemory:
    """Persistent memory of one rank, by kind: `weights` and `kv`.

    A standby worker shares the memory of the worker that runs, and makes none of its own.
    """

    def __init__(
        self,
        config: Config,
        assignment: WorkerAssignment,
        device: torch.device,
        client: MemoryClient | None,
    ) -> None:
        """client: None where the supervisor keeps no memory."""
        self.device = device
        self._client = client
        self._shares = assignment.standby
        self._numbers: dict[str, int] = {}  # of shared memory, by kind
        self._place = f"{assignment.replica}.{assignment.rank}"
        files = sorted(path for path in config.model_folder.iterdir() if path.is_file())
        stats = [(str(path), *_version_of(path)) for path in files]
        names = [(path.name, *_version_of(path)) for path in files]
        # what must be equal in another pipeline, too
        self.lasting_facts = names, assignment.rank, assignment.tp_size
        facts = stats, torch.__version__, str(device), assignment.rank, assignment.tp_size
        self._facts = msgspec.json.encode(config) + repr(facts).encode()

    def on_host(self) -> "PersistentMemory":
        """Return the same for memory of the host."""
        other = copy(self)
        other.device = torch.device("cpu")
        return other

    def check_own(self, kind: str) -> None:
        """Raise SharedMemoryError in a standby worker, which makes no memory of its own."""
        if self._shares:
            raise SharedMemoryError(f"{kind}: no memory of the running worker can be shared")

    @property
    def lasts(self) -> bool:
        """True if memory outlives this process."""
        return self._client is not None

    def take(self, kind: str, *facts: object) -> Region | None:
        """Return the memory of the last worker, if `facts`, the checkpoint and so on are equal."""
        taken = self._client.take(self._name(kind), shares=self._shares) if self._client else None
        if taken is not None:
            try:
                manifest = msgspec.msgpack.decode(taken.manifest, type=Manifest)
                if manifest.digest == self._digest(kind, facts):
                    memory = _map(taken.descriptor, manifest.num_bytes, self.device)
                    self._numbers[kind] = manifest.number
                    return Region(memory, manifest)
            except (OSError, ValueError) as error:  # also of msgspec
                log.warning("%s: memory of the last worker can't be used: %s", kind, error)
            finally:
                os.close(taken.descriptor)
        self.drop(kind)
        return None

    def take_over(self) -> None:
        """Own what was shared, once the worker that ran has exited.

        Raises SharedMemoryError if that worker may have damaged the memory.
        """
        for kind, number in self._numbers.items():
            taken = self._client.take(self._name(kind)) if self._client else None
            if taken is None:
                raise SharedMemoryError(f"{kind}: the memory of the last worker was dropped")
            os.close(taken.descriptor)
            if msgspec.msgpack.decode(taken.manifest, type=Manifest).number != number:
                raise SharedMemoryError(f"{kind}: the last worker had other memory")
        self._shares = False

    def drop(self, kind: str) -> None:
        """Free the memory of the last worker; raise SharedMemoryError if it still runs."""
        self.check_own(kind)
        if self._client:
            self._client.drop(self._name(kind))

    def allocate(self, kind: str, num_bytes: int, *facts: object) -> "NewRegion | None":
        """Return zeros, to be kept when they are filled; None where memory can't be persistent."""
        if self._client is None:
            return None
        try:
            memory, descriptor = _allocate(num_bytes, self.device)
        except OSError as error:
            log.warning("memory ends with the worker: %s", error)
            self._client = None
            return None
        number = 1 + secrets.randbits(53)
        manifest = Manifest(self._digest(kind, facts), number, num_bytes)
        keep = self._client.keep
        return NewRegion(Region(memory, manifest), self._name(kind), descriptor, keep)

    def _name(self, kind: str) -> str:
        return f"{kind}.{self._place}"

    def _digest(self, kind: str, facts: tuple[object, ...]) -> bytes:
        return hashlib.sha256(self._facts + repr((kind, facts)).encode()).digest()


class NewRegion(NamedTuple):
    """Memory that is being filled; it is freed with this process unless it is kept."""

    region: Region
    name: str
    descriptor: int
    pass_on: Callable[[str, bytes, int], None]

    def keep(self) -> None:
        """Pass the filled memory on to the supervisor."""
        region = self.region
        if region.memory.is_cuda:
            torch.cuda.synchronize(region.memory.device)
        try:
            self.pass_on(self.name, msgspec.msgpack.encode(region.manifest), self.descriptor)
        except OSError as error:
            log.warning("memory ends with the worker: %s", error)
        finally:
            os.close(self.descriptor)


def load_model(
    memory: PersistentMemory,
    config: Config,
    make: Callable[[], Model],
    fill: Callable[[Model], None],
) -> Model:
    """Return a model with the last worker's weights, or one that `make` makes and `fill` loads."""
    if config.quantization in INTEGER_BITS:  # made of the weights, which are then freed
        memory.check_own("weights")
        model = make()
        fill(model)
        return model
    if taken := memory.take("weights"):
        with without_memory():
            model = make()
        attach(model, taken)
        log.info("weights: %.2f GiB of the last worker", taken.manifest.num_bytes / 2**30)
        return model
    memory.drop("kv")  # computed with other weights, and in the way of these
    if memory.lasts and memory.device.type != "cpu":
        with without_memory():
            model = make()
        if new := _allocate_for(model, memory):
            attach(model, new.region)
            fill(model)
            new.keep()
            return model
    model = make()
    fill(model)  # the weights of a CPU may change their type
    if memory.lasts and (new := _allocate_for(model, memory)):
        attach(model, new.region, copies=True)
        new.keep()
    return model


def _allocate_for(model: nn.Module, memory: PersistentMemory) -> NewRegion | None:
    """Return memory for the parameters of a model."""
    tensors, begin = [], 0
    for name, parameter in model.named_parameters():
        dtype = str(parameter.dtype).removeprefix("torch.")
        tensors.append(Placed(name, dtype, tuple(parameter.shape), begin))
        begin += -(-parameter.numel() * parameter.itemsize // ALIGNMENT) * ALIGNMENT
    new = memory.allocate("weights", begin)
    if new:
        new.region.manifest.tensors = tensors
    return new


def attach(model: nn.Module, region: Region, copies: bool = False) -> None:
    """Let the parameters of a model lie in memory; copies: fill the memory with their content."""
    parameters = dict(model.named_parameters())
    for placed in region.manifest.tensors:
        parameter = parameters.pop(placed.name)
        dtype: Any = getattr(torch, placed.dtype)
        view = region.view(placed.begin, placed.shape, dtype)
        if copies:
            view.copy_(parameter.data)
        parameter.data = view
    if parameters:
        raise RuntimeError(f"persistent weights: {min(parameters)} is missing")


def _allocate(num_bytes: int, device: torch.device) -> tuple[Tensor, int]:
    """Return zeros and their descriptor. Raises OSError."""
    if device.type == "cuda":
        from penstock.services.worker.memory import cuda_memory

        memory, descriptor = cuda_memory.allocate(num_bytes, device)
        return memory.zero_(), descriptor
    descriptor = create_memory(num_bytes)
    return _map(descriptor, num_bytes, device), descriptor


def _map(descriptor: int, num_bytes: int, device: torch.device) -> Tensor:
    if device.type == "cuda":
        from penstock.services.worker.memory import cuda_memory

        return cuda_memory.map_memory(descriptor, num_bytes, device)
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
