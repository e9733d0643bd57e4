"""Weights and sizes of compiled layers, and the arguments of the compiled functions."""

from typing import NamedTuple

from torch import Tensor

from penstock.kernels.layouts.step import Slots, StepBuffers
from penstock.kernels.packed.matrices import Integers

Matrix = Tensor | Integers
MATRICES = "qkv", "o", "gate_up", "down"
ALL_MATRICES = *MATRICES, "ba"  # the gates of DeltaNet have 16 bits in every format
# fields of `penstock.kernels.recurrent.delta_rule.State`
STATE = "recurrent", "inputs", "window_inputs", "window_gates"
TOKENS = 16  # tokens that a block of columns of a DeltaNet state meets in turn


class LayerWeights(NamedTuple):
    """Weights of a layer: norms in float32; matrices in float32, 16 bits or integers."""

    input_norm: Tensor
    qkv: Matrix  # a gate may follow each query head; z follows in DeltaNet
    q_norm: Tensor  # of query heads, or in DeltaNet of the heads of outputs
    k_norm: Tensor | None
    o: Matrix
    post_norm: Tensor
    gate_up: Matrix | None  # gate, then up; None: the layer has a different second half
    down: Matrix | None
    # of DeltaNet only
    ba: Matrix | None = None
    conv: Tensor | None = None  # [kernel, channels]
    a_log: Tensor | None = None
    dt_bias: Tensor | None = None


class HeadShape(NamedTuple):
    """Sizes of attention heads that the code contains."""

    head_dim: int
    group: int  # query heads per KV head
    rotated: int  # features that RoPE rotates
    gated: bool = False  # True if a gate follows each query head

    @property
    def query_parts(self) -> int:
        return 2 if self.gated else 1


class DeltaShape(NamedTuple):
    """Sizes of a rank's part of a DeltaNet layer, which the code contains."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    window: int

    @property
    def group(self) -> int:
        return self.value_heads // self.key_heads

    @property
    def outputs(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Number of features of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.outputs

    @property
    def width(self) -> int:
        return self.channels + self.outputs

    @property
    def scratch_words(self) -> int:
        """Number of float32 elements of a thread's scratch memory."""
        of_token = 2 * self.key_dim + 1 + self.group * (self.value_dim + 2)
        return self.group * self.key_dim * self.value_dim + TOKENS * of_token

    def state(self, num_blocks: int) -> list[tuple[int, ...]]:
        """Return the shapes of STATE."""
        return [
            (num_blocks, self.value_heads, self.key_dim, self.value_dim),
            (num_blocks, self.kernel - 1, self.channels),
            (num_blocks, self.window, self.channels),
            (num_blocks, self.value_heads, self.window, 2),
        ]


class LayerShape(NamedTuple):
    """Sizes of a rank's part of each layer."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    rotated: int | None = None  # features of a head that RoPE rotates; None: all
    gated: bool = False  # True if a gate follows each query head
    delta: DeltaShape | None = None  # None: all layers have attention

    @property
    def head(self) -> HeadShape:
        group, rotated = self.heads // self.kv_heads, self.rotated or self.head_dim
        return HeadShape(self.head_dim, group, rotated, self.gated)

    @property
    def qkv(self) -> int:
        """Number of features of queries, keys and values, with gates."""
        return (self.heads * self.head.query_parts + 2 * self.kv_heads) * self.head_dim

    @property
    def inputs(self) -> tuple[int, ...]:
        """Numbers of in_features: of the residual stream, the mixers' outputs, the inner ones."""
        of_delta = self.delta.outputs if self.delta else 0
        return self.hidden, max(self.heads * self.head_dim, of_delta), self.intermediate


# int64 values of a layer: addresses, and numbers of kinds of matrices
LAYER = (
    *LayerWeights._fields,
    *(f"{name}_scale" for name in ALL_MATRICES),
    *(f"{name}_kind" for name in ALL_MATRICES),
    *("k_cache", "v_cache"),
    *STATE,
)


class StepFields(NamedTuple):
    """Arguments of the layers as int64: sizes, and the addresses of the other fields."""

    num_tokens: int
    num_rows: int
    normed: int
    qkv: int
    gates: int  # b and a of DeltaNet
    attended: int
    inner: int
    scratch: int
    scratch_size: int  # float32 elements per thread
    barrier: int
    positions: int
    slots: int
    starts: int  # `ForwardBatch.cu_seqlens_q`
    lengths: int  # `ForwardBatch.context_lens`
    tables: int
    max_blocks: int
    block_size: int
    piece: int  # adjacent keys of a tile
    rope: int
    scale: int
    eps: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    num_decode: int = 0  # leading rows that decode; for DeltaNet, with fields of `StateStep`
    read: int = 0
    written: int = 0
    first: int = 0
    last: int = 0
    window: int = 0
    state_stride: int = 0  # float32 elements from a state block to the next
    residual: int = 0
    target: int = 0  # receives the sums: the residual stream or memory for a part of it
    num_ranks: int = 1  # ranks that share the memory of the following fields; 1: no other rank
    rank: int = 0
    ranks_barrier: int = 0
    parts: int = 0  # products of each rank, in two turns
    part_size: int = 0  # float32 elements per rank and turn
    turn: int = 0  # turn of the first half


class HeadFields(NamedTuple):
    """Arguments of the product with the norm of x as int64."""

    x: int
    norm: int
    eps: int
    weight: int
    scale: int  # scale of a weight of integers, otherwise 0
    out: int
    normed: int
    scratch: int
    scratch_size: int
    barrier: int
    num_rows: int
    size: int
    columns: int


class SampleFields(NamedTuple):
    """Arguments of the sampling of rows as int64."""

    logits: int
    stride: int
    vocab_size: int
    num_rows: int
    slots: int
    positions: int
    parameters: int  # the slot table
    last_token: int
    thresholds: int = 0  # thresholds of each row's scores; -inf: no score is removed
    out: int = 0


# arguments that apply a plan, as int64: sizes and addresses
PLAN = (
    *("record", "block_size", "max_blocks", "num_rows", "num_tokens", "num_tiles", "tile_size"),
    *(f"slot_{name}" for name in Slots._fields),
    *StepBuffers._fields,
)
