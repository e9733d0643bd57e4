"""Messages between a scheduler and its workers, in addition to plans and sampled tokens."""

from typing import ClassVar

from msgspec import Struct

from penstock.protocol.messages.packed import PackedLists
from penstock.protocol.messages.pipeline import PROTOCOL_VERSION
from penstock.protocol.messages.plan import BatchPlan, SampledTokens
from penstock.protocol.messages.structured import StructuredOutputs


class WorkerState(Struct, array_like=True, tag=True):
    """Worker → scheduler: name, place and memory; sent at start, on change, and as heartbeat."""

    name: str
    group: str = ""  # the tensor-parallel group it has joined; empty: none yet
    rank: int = -1
    num_blocks: int = 0  # KV blocks that fit; 0: the model is not loaded yet
    block_size: int = 0  # tokens per block
    # median and 99th percentile of the GPU's wait between two steps; 0 on a CPU
    idle_us: tuple[float, float] = (0.0, 0.0)
    pid: int = 0
    # at the same place in every version, or another one could not be refused
    version: int = PROTOCOL_VERSION
    node: str = ""  # id of its machine; empty where there is only one
    # `tcp://host:port` at which it could listen as rank 0, of a worker without a group
    rendezvous: str = ""
    incarnation: int = 0  # a larger one was started later
    # of its KV memory, which may be an earlier worker's; 0: the memory ends with the worker
    memory_id: int = 0
    epoch: int = -1  # of the plans that it expects
    num_plans_before: int = 0  # that it has run of the epoch before, which was another scheduler's
    host_slots: int = 0  # KV blocks that fit into its host tier; 0: there is none, or none yet
    host_memory_id: int = 0  # of the host tier's memory, as `memory_id`
    standby: bool = False  # whether it is in a standby group: see `WorkerAssignment`


class WorkerAssignment(Struct, array_like=True, tag=True):
    """Scheduler → worker: its place in the tensor-parallel group.

    A member of a group takes the new epoch from it, and drops the persistent batch.
    """

    epoch: int
    group: str
    rank: int
    tp_size: int
    rendezvous: str  # `tcp://host:port` for torch.distributed
    # KV blocks that the group before had, whose requests wait; 0: there was none
    num_blocks: int = 0
    # of that group's members on this worker's machine: their memory is free once they exit
    pids_before: list[int] = []
    replica: int = 0
    spans_nodes: bool = False  # whether the group's workers are on several machines
    # whether it only maps the memory of a group that runs, and prepares to continue with it
    standby: bool = False


class CopyBlocks(Struct, PackedLists, array_like=True, tag=True):
    """Scheduler → workers: copies between KV blocks and host slots, ahead of a plan.

    Each list is int32 [num_copies, 2]: (block, slot) of a copy to the host, or (block, -1 - slot)
    of one from there, in order.
    """

    item_bytes: ClassVar = {"blocking": 8, "overlapped": 8}

    epoch: int
    blocking: bytes = b""  # between the steps of earlier plans and that of the next one
    # after these; they may end after the step of the next plan, but before the one that follows
    overlapped: bytes = b""
    # of the prefixes that are copied to the host, in this order, where there is a folder
    hashes: list[bytes] = []


class FolderRequest(Struct, PackedLists, array_like=True, tag=True):
    """Scheduler → workers: work at the files of KV blocks, which have the hashes of prefixes."""

    item_bytes: ClassVar = {"slots": 4}

    epoch: int
    fetched: list[bytes] = []  # to be read into host slots
    slots: bytes = b""  # int32 [num_fetched], reserved until the files are reported
    removed: list[bytes] = []  # content that may be wrong
    lists: bool = False  # forget earlier requests, and report all files as added


class FolderReport(Struct, array_like=True, tag=True):
    """Worker → scheduler: what happened to files of KV blocks, by the hashes of prefixes."""

    epoch: int
    rank: int
    added: list[bytes] = []
    removed: list[bytes] = []
    fetched: list[bytes] = []  # in their host slots
    failed: list[bytes] = []  # requested, but missing or wrong


class CompileGrammars(Struct, array_like=True, tag=True):
    """Scheduler → rank 0: grammars to compile during the steps, and compiled ones to forget.

    A grammar's number is its scheduler's, in one epoch. Rows with a grammar name its number, and
    come after its `GrammarCompiled`. A row that runs keeps a grammar that is forgotten.
    """

    epoch: int
    # (number, grammar), to be compiled in this order
    added: list[tuple[int, StructuredOutputs]] = []
    removed: list[int] = []


class GrammarCompiled(Struct, array_like=True, tag=True):
    """Rank 0 → scheduler: the result of compiling a grammar."""

    epoch: int
    number: int
    # by which the worker's memory grew, about
    num_bytes: int = 0
    # why it can't be used; empty: rows may use it
    error: str = ""


class WorkerExit(Struct, array_like=True, tag=True):
    """Scheduler → worker: its group has lost a member; the worker exits and is restarted."""

    reason: str


ToWorker = WorkerAssignment | WorkerExit | CopyBlocks | FolderRequest | CompileGrammars | BatchPlan
FromWorker = WorkerState | SampledTokens | FolderReport | GrammarCompiled
