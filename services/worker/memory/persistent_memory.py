"""The persistent memory of a rank, which outlives its worker: weights and KV cache.

The supervisor keeps the descriptors. Weights are passed to the supervisor when they are complete,
so that partly loaded weights of a killed worker are never used. The next worker of this rank uses
the memory if checkpoint, configuration and device are the same.
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
    """The place of a tensor in a memory region."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int  # offset in bytes


class Manifest(msgspec.Struct, array_like=True):
    """The description of a persistent memory region."""

    digest: bytes  # digest of all facts that must be equal for a worker to use the memory
    number: int  # random and unique
    num_bytes: int
    num_blocks: int = 0  # number of blocks of a KV cache
    tensors: list[Placed] = []


class Region(NamedTuple):
    """A memory region, uint8 [num_bytes], with its manifest."""

    memory: Tensor
    manifest: Manifest

    def view(self, begin: int, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        shape = torch.Size(shape)
        num_bytes = shape.numel() * dtype.itemsize
        return self.memory[begin : begin + num_bytes].view(dtype).view(shape)


def _version_of(path: Path) -> tuple[int, ...]:
    """Return facts that change with a file's contents, even if size and time are restored."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


class SharedMemoryError(ConnectionError):
    """Memory of a running worker that a standby worker can't share or take over."""


class PersistentMemory:
    """The persistent memory of a rank, by kind, such as `weights` and `kv`.

    A standby worker shares the memory of the running worker and allocates no memory of its own.
    """

    def __init__(
        self,
        config: Config,
        assignment: WorkerAssignment,
        device: torch.device,
        client: MemoryClient | None,
    ) -> None:
        """Collect the facts that must be equal. Without a client, no memory is persistent."""
        self.device = device
        self._client = client
        self._shares = assignment.standby
        self._numbers: dict[str, int] = {}  # kind → number of the shared memory
        self._place = f"{assignment.replica}.{assignment.rank}"
        files = sorted(path for path in config.model_folder.iterdir() if path.is_file())
        stats = [(str(path), *_version_of(path)) for path in files]
        names = [(path.name, *_version_of(path)) for path in files]
        # facts that must also be equal in another pipeline, for the folder tier
        self.lasting_facts = names, assignment.rank, assignment.tp_size
        facts = stats, torch.__version__, str(device), assignment.rank, assignment.tp_size
        self._facts = msgspec.json.encode(config) + repr(facts).encode()

    def on_host(self) -> "PersistentMemory":
        """Return a copy of this object for host memory."""
        other = copy(self)
        other.device = torch.device("cpu")
        return other

    def check_own(self, kind: str) -> None:
        """Raise SharedMemoryError in a standby worker, which must not allocate memory."""
        if self._shares:
            raise SharedMemoryError(f"{kind}: no memory of the running worker can be shared")

    @property
    def lasts(self) -> bool:
        """True if the memory outlives this process."""
        return self._client is not None

    def take(self, kind: str, *facts: object) -> Region | None:
        """Return the last worker's memory if `facts` and configuration are equal, else drop it."""
        taken = self._client.take(self._name(kind), shares=self._shares) if self._client else None
        if taken is not None:
            try:
                manifest = msgspec.msgpack.decode(taken.manifest, type=Manifest)
                if manifest.digest == self._digest(kind, facts):
                    memory = _map(taken.descriptor, manifest.num_bytes, self.device)
                    self._numbers[kind] = manifest.number
                    return Region(memory, manifest)
            except (OSError, ValueError) as error:  # msgspec raises ValueError
                log.warning("%s: memory of the last worker can't be used: %s", kind, error)
            finally:
                os.close(taken.descriptor)
        self.drop(kind)
        return None

    def take_over(self) -> None:
        """Take over the shared memory after the exit of the running worker.

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
        """Free the last worker's memory. Raises SharedMemoryError in a standby worker."""
        self.check_own(kind)
        if self._client:
            self._client.drop(self._name(kind))

    def allocate(self, kind: str, num_bytes: int, *facts: object) -> "NewRegion | None":
        """Return zeros for the caller to fill and keep; None if memory can't be persistent."""
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
        return NewRegion(Region(memory, manifest), self._name(kind), descriptor, self._client.keep)

    def _name(self, kind: str) -> str:
        return f"{kind}.{self._place}"

    def _digest(self, kind: str, facts: tuple[object, ...]) -> bytes:
        return hashlib.sha256(self._facts + repr((kind, facts)).encode()).digest()


class NewRegion(NamedTuple):
    """New memory that is being filled. Without `keep`, the memory is freed with this process."""

    region: Region
    name: str
    descriptor: int
    pass_on: Callable[[str, bytes, int], None]

    def keep(self) -> None:
        """Pass the filled memory to the supervisor."""
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
    """Return a model with the last worker's weights, or one from `make` that `fill` loads."""
    if config.quantization in INTEGER_BITS:  # made of weights that are then freed
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
    memory.drop("kv")  # the KV was computed with other weights, and takes memory that these need
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
    """Return new memory for the parameters of a model, if possible."""
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
    """Move a model's parameters into memory, with their content if `copies` is True."""
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
    """Return new memory of zeros, and its descriptor. Raises OSError."""
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
