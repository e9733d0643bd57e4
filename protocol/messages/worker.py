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
    group: str = ""  # tensor-parallel group that the worker has joined; empty: none yet
    rank: int = -1
    num_blocks: int = 0  # KV blocks that fit; 0: the model is not loaded yet
    block_size: int = 0  # tokens per block
    # median and 99th percentile of the GPU's wait between two steps; 0 on a CPU
    idle_us: tuple[float, float] = (0.0, 0.0)
    pid: int = 0
    # at the same index in every version, so that other versions can be refused
    version: int = PROTOCOL_VERSION
    node: str = ""  # id of the worker's machine; empty without a cluster
    # `tcp://host:port` at which a worker without a group could listen as rank 0
    rendezvous: str = ""
    incarnation: int = 0  # a worker with a larger number was started later
    # id of the KV memory, which may be an earlier worker's; 0: the memory ends with the worker
    memory_id: int = 0
    epoch: int = -1  # epoch of the plans that the worker expects
    num_plans_before: int = 0  # plans run of the previous epoch (another scheduler's)
    host_slots: int = 0  # KV blocks that fit into the host tier; 0: no host tier, or none yet
    host_memory_id: int = 0  # id of the host tier's memory, as `memory_id`
    standby: bool = False  # whether the worker is in a standby group: see `WorkerAssignment`
    num_state_blocks: int = 0  # state blocks that fit; 0: the model has no recurrent state
    # before the first plan of an epoch, int32 [num_state_blocks, 2]: positions (first and last)
    # after which a sequence can continue from each block; -1: none
    kept_states: bytes = b""
    num_pieces: int = 0  # host slots that a state block takes
    # numbers of tokens to which steps with chunks of prompts are padded, ascending
    step_sizes: list[int] = []
    # tokens of the tiles to which attention pads a chunk, ascending; empty: it does not
    tile_sizes: list[int] = []
    # state block i lies in the place of this number of KV blocks, from the block i * this number;
    # 0: state blocks have memory of their own
    blocks_per_state: int = 0


class WorkerAssignment(Struct, array_like=True, tag=True):
    """Scheduler → worker: its place in the tensor-parallel group.

    A member of a group takes the new epoch from this message, and drops the persistent batch.
    """

    epoch: int
    group: str
    rank: int
    tp_size: int
    rendezvous: str  # `tcp://host:port` for torch.distributed
    # KV blocks of the previous group, whose requests wait; 0: there was no group
    num_blocks: int = 0
    # pids of the previous group's members on this worker's machine: exits free their memory
    pids_before: list[int] = []
    replica: int = 0
    spans_nodes: bool = False  # whether the group's workers are on several machines
    # whether the worker only maps the memory of a running group, to take over after a failure
    standby: bool = False


class CopyBlocks(Struct, PackedLists, array_like=True, tag=True):
    """Scheduler → workers: copies between KV blocks and host slots, ahead of a plan.

    Each list is int32 [num_copies, 2], in order: (block, slot) of a copy to the host, or
    (block, -1 - slot) of a copy from the host. A slot takes a KV block or a piece of a state block.
    In place of a block, -1 - n is the piece n of all state blocks.
    """

    item_bytes: ClassVar = {"blocking": 8, "overlapped": 8}

    epoch: int
    blocking: bytes = b""  # copies between the steps of earlier plans and the next plan's step
    # later copies: they may end after the next plan's step, but before the following step
    overlapped: bytes = b""
    # hashes of the prefixes that are copied to the host, in this order, if there is a folder; an
    # empty one gets no file
    hashes: list[bytes] = []


class FolderRequest(Struct, PackedLists, array_like=True, tag=True):
    """Scheduler → workers: operations on files of the folder tier, by the hashes of prefixes."""

    item_bytes: ClassVar = {"slots": 4, "stored_slots": 4}

    epoch: int
    fetched: list[bytes] = []  # files to read into host slots
    slots: bytes = b""  # int32 [num_fetched], reserved until the files are reported
    removed: list[bytes] = []  # files to remove, because their content may be wrong
    lists: bool = False  # forget earlier requests, and report all files as added
    stored: list[bytes] = []  # files to write from host slots
    stored_slots: bytes = b""  # int32 [num_stored]


class FolderReport(Struct, array_like=True, tag=True):
    """Worker → scheduler: changes of files of the folder tier, by the hashes of prefixes."""

    epoch: int
    rank: int
    added: list[bytes] = []
    removed: list[bytes] = []
    fetched: list[bytes] = []  # files that were read into their host slots
    failed: list[bytes] = []  # files that were requested, but are missing or wrong
    unwritten: list[bytes] = []  # files that were to be written, but are not there
    # all files that a FolderRequest asked to list were reported, or others are not worth the wait
    is_listed: bool = False


class CompileGrammars(Struct, array_like=True, tag=True):
    """Scheduler → rank 0: grammars to compile during the steps, and compiled grammars to forget.

    The scheduler numbers its grammars within an epoch. A row with a grammar contains the number,
    and comes after the grammar's `GrammarCompiled`. A running row keeps a forgotten grammar.
    """

    epoch: int
    # (number, grammar), to be compiled in this order
    added: list[tuple[int, StructuredOutputs]] = []
    removed: list[int] = []


class GrammarCompiled(Struct, array_like=True, tag=True):
    """Rank 0 → scheduler: the result of compiling a grammar."""

    epoch: int
    number: int
    # approximate growth of the worker's memory
    num_bytes: int = 0
    # reason why the grammar can't be used; empty: rows may use the grammar
    error: str = ""


class WorkerExit(Struct, array_like=True, tag=True):
    """Scheduler → worker: its group has lost a member; the worker exits and is restarted."""

    reason: str


ToWorker = WorkerAssignment | WorkerExit | CopyBlocks | FolderRequest | CompileGrammars | BatchPlan
FromWorker = WorkerState | SampledTokens | FolderReport | GrammarCompiled
