"""The host tier of the KV cache: slots in host memory, and copies between slots and blocks.

A slot takes a KV block or a piece of a state block. The scheduler has the index of the slots:
`penstock.services.scheduler.blocks.offload_index`. For a GPU, the slots are pinned, and copies have
their own stream.
"""

import hashlib
import logging
import mmap
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from penstock.kernels.layouts.states import States
from penstock.protocol.checkpoint import ModelError
from penstock.protocol.config import DISTRIBUTION, Config
from penstock.protocol.messages.packed import unpack
from penstock.protocol.messages.plan import STATE_CHUNK, STATE_WINDOW
from penstock.protocol.messages.worker import CopyBlocks, FolderRequest
from penstock.services.worker.memory.kv_folder import MAGIC, KvFolder
from penstock.services.worker.memory.persistent_memory import PersistentMemory

log = logging.getLogger(__name__)
PAGE = 4096
PINNED_AT_ONCE = 1 << 26  # bytes per call; the driver holds a lock, which delays steps


class KvOffload:
    """The host tier of a rank, which copies blocks in the order of the scheduler's plans."""

    folder: KvFolder | None = None

    def __init__(
        self,
        kv: Sequence[Tensor],
        host: Tensor,
        num_slots: int,
        memory_id: int,
        states: States | None = None,
    ) -> None:
        """Use `host` for slots. On a GPU, pin the slots in a thread.

        kv: tensors of the KV cache, [num_layers, 2, num_blocks, ...].
        host: host memory, uint8 [num_slots * slot_bytes(kv)]. memory_id: id of the host memory.
        """
        self._kv = [_words(tensor) for tensor in kv]
        self._host = host.view(num_slots, -1)
        begin, self._slots = 0, []
        for words in self._kv:
            num_bytes = words[:, :, 0].nbytes
            part = self._host[:, begin : begin + num_bytes].view(words.dtype)
            self._slots.append(part.view(num_slots, *words.shape[:2], -1))
            begin += -(-num_bytes // 16) * 16
        # of each piece of a state block: views [num_state_blocks, words] and the words of a slot
        self._pieces = _pieces(states, self._host.view(torch.int32)) if states else []
        self.memory_id = memory_id
        self.num_slots = 0  # 0 until the slots are pinned
        self.pinning: threading.Thread | None = None
        self._device = kv[0].device
        self._stream: torch.cuda.Stream | None = None
        # the end of the copies that overlap a step; the step after that step waits for it
        self._copied: torch.cuda.Event | None = None
        self._are_new = False  # True if the last copies overlap the next step
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self.pinning = threading.Thread(target=self._pin, args=(num_slots,), daemon=True)
            self.pinning.start()
        else:
            self.num_slots = num_slots

    @property
    def num_pieces(self) -> int:
        """Number of slots that a state block takes."""
        return len(self._pieces)

    def use_folder(self, config: Config, memory: PersistentMemory, *facts: object) -> None:
        """Add the folder tier, for KV with these facts of its layout. Raises ModelError."""
        is_cuda = self._device.type == "cuda"
        name = torch.cuda.get_device_name(self._device) if is_cuda else "cpu"
        options = config.dtype, config.quantization, config.attention, config.enable_expert_parallel
        versions = version(DISTRIBUTION), torch.__version__, config.deterministic
        all_facts = memory.lasting_facts, options, versions, name, facts
        digest = hashlib.sha256(MAGIC + repr(all_facts).encode()).digest()
        path, num_bytes = Path(config.kv_offload_folder), config.kv_offload_folder_gib * 2**30
        self.folder = KvFolder(path, digest, num_bytes, self._host.numpy())
        if not self.folder.max_files:
            raise ModelError(
                f"--kv-offload-folder-gib: got {config.kv_offload_folder_gib}, expected "
                f"{self._host.shape[1] / 2**30:.2g} or more for one block"
            )

    def work(self, request: FolderRequest) -> None:
        """Start the work of a folder request."""
        if self.folder is None:
            return
        if request.lists:
            self.folder.restart()
        if request.removed:
            self.folder.remove(request.removed)
        self.folder.fetch(request.fetched, unpack(request.slots), self._end())
        self.folder.store(request.stored, unpack(request.stored_slots), self._end())

    def clear(self) -> None:
        """Cancel folder requests, because another scheduler uses the slots from now on."""
        if self.folder:
            self.folder.restart()

    def _end(self) -> Callable[[], object]:
        """Return a function that waits for all copies launched so far."""
        return self._stream.record_event().synchronize if self._stream else int

    def copy(self, copies: CopyBlocks) -> None:
        """Run copies. On a GPU, only launch the copies."""
        slots = [slot for raw in (copies.blocking, copies.overlapped) for slot in unpack(raw)[1::2]]
        written = [slot for slot in slots if slot >= 0]
        if self.folder:
            self.folder.overwrite(written)
        self._launch(copies)
        if self.folder:
            self.folder.store(copies.hashes, written, self._end())

    def _launch(self, copies: CopyBlocks) -> None:
        if self._stream is None:
            self._run(copies.blocking)
            self._run(copies.overlapped)
            return
        step = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(step)
        with torch.cuda.stream(self._stream):
            self._run(copies.blocking)
            step.wait_stream(self._stream)
            self._run(copies.overlapped)
            self._copied = self._stream.record_event()
        self._are_new = True

    def before_step(self) -> None:
        """Make the next step wait for the copies that overlapped the last step."""
        if self._copied and not self._are_new:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copied = None
        self._are_new = False

    def _run(self, packed: bytes) -> None:
        """Run packed (block, slot) copies on the current stream."""
        numbers = iter(unpack(packed))
        for block, slot in zip(numbers, numbers, strict=True):
            for there, here in self._places(block, max(slot, -1 - slot)):
                if slot < 0:
                    there.copy_(here.to(self._device, non_blocking=True))
                elif self._stream is None:
                    here.copy_(there)
                else:
                    here.copy_(there.contiguous(), non_blocking=True)

    def _places(self, block: int, slot: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each tensor of a block, or of a piece of a state block, with its part of a slot."""
        if block >= 0:
            for words, slots in zip(self._kv, self._slots, strict=True):
                yield words[:, :, block], slots[slot]
            return
        state, piece = divmod(-1 - block, self.num_pieces)
        for words, slots in self._pieces[piece]:
            yield words[state], slots[slot]

    def _pin(self, num_slots: int) -> None:
        """Pin the slots, PINNED_AT_ONCE bytes at a time."""
        torch.cuda.set_device(self._device)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        step = max(1, PINNED_AT_ONCE // self._host.shape[1])
        for begin in range(0, num_slots, step):
            part = self._host[begin : begin + step]
            if int(code := runtime.cudaHostRegister(part.data_ptr(), part.nbytes, 0)):
                log.warning("no host tier: its memory can't be pinned: %s", code)
                return
        self.num_slots = num_slots
        log.info("host tier: %d blocks are pinned", num_slots)


def _words(tensor: Tensor) -> Tensor:
    """Return a view [num_layers, 2, num_blocks, words of a block] with the widest words."""
    raw = tensor.view(torch.uint8).flatten(3)
    wide = next(
        t for t in (torch.int64, torch.int32, torch.uint8) if raw.shape[3] % t.itemsize == 0
    )
    return raw.view(wide)


def _pieces(states: States, host: Tensor) -> list[list[tuple[Tensor, Tensor]]]:
    """Cut the content of a state block, its positions last, into pieces of the size of a slot.

    host: the slots, int32 [num_slots, words of a slot].
    Return for each piece pairs of [num_state_blocks + 1, words] and [num_slots, words], with equal
    numbers of words.
    """
    tensors = [tensor for layer in states.layers for tensor in layer]
    pieces: list[list[tuple[Tensor, Tensor]]] = []
    size = host.shape[1]
    room = 0
    for tensor in (*tensors, states.positions):
        rest = tensor.flatten(1).view(torch.int32)
        while rest.shape[1]:
            if not room:
                pieces.append([])
                room = size
            number = min(room, rest.shape[1])
            pieces[-1].append((rest[:, :number], host[:, size - room : size - room + number]))
            rest, room = rest[:, number:], room - number
    return pieces


def slot_bytes(kv: Sequence[Tensor]) -> int:
    """Return the size of a slot in bytes, in whole pages."""
    num_bytes = sum(-(-tensor[:, :, 0].nbytes // 16) * 16 for tensor in kv)
    return -(-num_bytes // PAGE) * PAGE


def make_offload(
    config: Config, memory: PersistentMemory, kv: Sequence[Tensor], states: States | None = None
) -> KvOffload:
    """Return the host tier, in the last worker's memory or in new memory. Raises ModelError."""
    size = slot_bytes(kv)
    num_slots = int(config.kv_offload_gib * 2**30 / size)
    if not num_slots:
        raise ModelError(
            f"--kv-offload-gib: got {config.kv_offload_gib}, expected {size / 2**30:.2g} or more "
            "for one block"
        )
    facts: list[object] = [(str(tensor.dtype), tensor.shape[:2], tensor.shape[3:]) for tensor in kv]
    if states:
        tensors = [tensor for layer in states.layers for tensor in layer]
        facts += [(str(tensor.dtype), tensor.shape[1:]) for tensor in tensors]
        facts += [STATE_CHUNK, STATE_WINDOW]
    host, memory_id = _host_memory(config, memory.on_host(), num_slots * size, facts)
    offload = KvOffload(kv, host, num_slots, memory_id, states)
    if config.kv_offload_folder:
        offload.use_folder(config, memory, *facts)
    return offload


def _host_memory(
    config: Config, memory: PersistentMemory, num_bytes: int, facts: list[object]
) -> tuple[Tensor, int]:
    """Return the memory for the slots, and the id of this memory."""
    if kept := memory.take("host", *facts):
        return kept.memory, kept.manifest.number
    new = memory.allocate("host", num_bytes, *facts)
    if new is None:
        try:
            host = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
        except OSError as error:
            raise ModelError(
                f"--kv-offload-gib: got {config.kv_offload_gib}, expected less: {error}"
            ) from error
        return host, 1 + secrets.randbits(53)
    new.keep()
    return new.region.memory, new.region.manifest.number
