"""Weights and sizes of compiled layers, and the arguments of the compiled functions."""

from typing import NamedTuple

from torch import Tensor

from penstock.kernels.layouts.step import Slots, StepBuffers
from penstock.kernels.packed.matrices import Integers

Matrix = Tensor | Integers
MATRICES = "qkv", "o", "gate_up", "down"


class LayerWeights(NamedTuple):
    """Weights of a layer: norms in float32; matrices in float32, 16 bits or integers."""

    input_norm: Tensor
    qkv: Matrix
    q_norm: Tensor
    k_norm: Tensor
    o: Matrix
    post_norm: Tensor
    gate_up: Matrix | None  # gate, then up; None: the layer has a different second half
    down: Matrix | None


class LayerShape(NamedTuple):
    """Sizes of a rank's part of each layer."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float

    @property
    def qkv(self) -> int:
        """Number of features of queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


# int64 values of a layer: addresses, and numbers of kinds of matrices
LAYER = (
    *LayerWeights._fields,
    *(f"{name}_scale" for name in MATRICES),
    *(f"{name}_kind" for name in MATRICES),
    *("k_cache", "v_cache"),
)


class StepFields(NamedTuple):
    """Arguments of the layers as int64: sizes, and the addresses of the other fields."""

    num_tokens: int
    num_rows: int
    normed: int
    qkv: int
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
