"""Weights cut across the ranks of a tensor-parallel group (Megatron-LM, arXiv:1909.08053).

A `Layer` allocates a rank's part of some weights of the description, and yields the slices of the
checkpoint that fill it. Layers are built on torch's default device, in its default dtype, for
inference only.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.kernels.elementwise import embedding
from penstock.kernels.layouts.packed import BLOCK as PACKED_BLOCK
from penstock.kernels.linear.linear import linear, linear_add, norm_linear
from penstock.kernels.matrices import BLOCK, FP8, Matrix, Quantized, Rows
from penstock.kernels.packed.matrices import Integers, Packed, fitting_group, num_groups
from penstock.models.architecture import Part, Ranks, Weight
from penstock.models.tensor_parallel import TensorParallel
from penstock.protocol.quantization import FP8_ROWS, WeightFormat

_takes_integers: ContextVar[bool] = ContextVar("takes_integers", default=False)
_has_memory: ContextVar[bool] = ContextVar("has_memory", default=True)


class Slice(NamedTuple):
    """Part of a checkpoint tensor that a rank loads."""

    name: str
    shape: tuple[int, ...]  # shape of the whole tensor
    dim: int  # dimension that is cut
    start: int
    stop: int
    target: Matrix | Integers  # destination, with the slice's shape
    added: float = 0.0  # added to the numbers


class Layer(nn.Module):
    """Layer whose `weight` consists of a rank's parts of several weights, concatenated by rows."""

    weight: Matrix  # may be `Integers`, which only compiled layers multiply

    def __init__(
        self,
        tp: TensorParallel,
        weights: Sequence[Weight],
        weight_format: WeightFormat | None = None,
        expert_parallel: bool = False,
        shared: Sequence[Weight] = (),
    ) -> None:
        """Allocate the weight.

        weight_format: format of the whole weights. shared: weights of one more expert.
        """
        super().__init__()
        self.tp, self.weights, self.shared = tp, tuple(weights), tuple(shared)
        self.ranks = Ranks(tp.size, tp.rank, tp.on_gpus, expert_parallel)
        first, *_ = shapes = [weight.shape_of_rank(self.ranks) for weight in weights]
        row_dim = 1 if self.weights[0].experts else 0
        self.sizes = [shape[row_dim] for shape in shapes]  # number of rows of each part
        is_cut = first[-2:] != self.weights[0].shape
        if weight_format and (is_cut or len(self.weights) > 1):
            rows, columns = ((), first[-1]) if self.weights[0].dim else (self.sizes, 0)
            weight_format = weight_format.after_cut(rows, columns)
        experts = (number + bool(shared) for number in first[:row_dim])
        shape = (*experts, sum(self.sizes), *first[row_dim + 1 :])
        if self.weights[0].is_float32:
            self.weight = parameter(*shape, dtype=torch.float32)
        else:
            add_weight(self, *shape, weight_format=weight_format)

    def slices(self) -> Iterator[Slice]:
        """Yield the slices of checkpoint tensors that make up this rank's weight."""
        for weight, target in zip(self.weights, self._split(self.weight), strict=True):
            yield from self._slices(weight, weight.name, target)

    def _split(self, weight: Any) -> Sequence[Any]:
        return (weight,) if len(self.sizes) == 1 else weight.split(self.sizes)

    def _slices(self, weight: Weight, name: str, target: Any) -> Iterator[Slice]:
        """Yield the slices of a tensor."""
        cuts = weight.parts(self.ranks)
        if weight.is_interleaved:
            yield from _unit_slices(weight, cuts, target)
            return
        pieces = (target,) if len(cuts) == 1 else target.split([cut.length for cut in cuts])
        for (start, stop, length), piece in zip(cuts, pieces, strict=True):
            own = stop - start
            filled = piece if own == length else piece.split([own, length - own])[0]
            yield Slice(name, weight.shape, weight.dim, start, stop, filled, weight.added)


def _unit_slices(weight: Weight, cuts: list[Part], target: Any) -> Iterator[Slice]:
    """Yield a slice for each unit of each axis of an interleaved weight."""
    sizes = [axis.unit_size for axis in weight.axes]
    first, number = cuts[0].start // sizes[0], cuts[0].length // sizes[0]
    pieces = iter(target.split([size for size in sizes for _ in range(number)]))
    for axis, size in enumerate(sizes):
        for unit in range(first, first + number):
            start = unit * sum(sizes) + sum(sizes[:axis])
            yield Slice(weight.name, weight.shape, weight.dim, start, start + size, next(pieces))


class ColumnParallelLinear(Layer):
    """Adjacent linear layers with the same input; a rank has a share of every layer's outputs."""

    def forward(self, x: Tensor, norm: "RMSNorm") -> Tensor:
        """Return the layers' outputs for norm(x): [num_tokens, sum(sizes)].

        x: [num_tokens, in_features].
        """
        return norm_linear(x, norm.weight, norm.eps, self.weight)


class RowParallelLinear(Layer):
    """Linear layer whose inputs are divided among the ranks; every rank has the whole output."""

    def forward(self, x: Rows, residual: Tensor) -> Tensor:
        """Return residual plus the layer's output for x [num_tokens, in_features / tp size]."""
        if self.tp.size == 1:
            return linear_add(x, self.weight, residual)
        num_rows, num_columns = residual.shape
        out = self.tp.empty(num_rows, num_columns, residual.dtype)
        return self.tp.all_reduce(linear(x, self.weight, out), residual)


class Experts(Layer):
    """Adjacent linear layers of each expert: [local experts, out_features, in_features]."""

    def slices(self) -> Iterator[Slice]:
        """Yield the slices of every expert; slices are empty for experts of other ranks.

        The shared expert is the last one.
        """
        here = self.weights[0].experts_of_rank(self.ranks)
        for expert in range(self.weights[0].num_tensors):
            is_here = expert in here
            targets = self._split(self.weight[expert - here.start if is_here else 0])
            for weight, target in zip(self.weights, targets, strict=True):
                name = weight.name.format(expert)
                if is_here:
                    yield from self._slices(weight, name, target)
                else:
                    yield Slice(name, weight.shape, 0, 0, 0, target[:0])
        if self.shared:
            targets = self._split(self.weight[len(here)])
            for weight, target in zip(self.shared, targets, strict=True):
                yield from self._slices(weight, weight.name, target)


class VocabParallelEmbedding(Layer):
    """Token embeddings, or the output layer, or both; each rank has a shard of the vocabulary.

    On GPUs the vocabulary is cut between the sampler's runs of token ids. The last ranks' rows are
    padded with zeros.
    """

    weight: Any  # a tensor; an output layer may be `Quantized`

    def __init__(self, tp: TensorParallel, weight: Weight, is_fp8: bool = False) -> None:
        super().__init__(tp, [weight], FP8_ROWS if is_fp8 else None)
        self.vocab_size = weight.shape[0]
        self.start, self.stop, _ = weight.parts(self.ranks)[0]

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings, [num_tokens, hidden_size], of input_ids, int64 [num_tokens]."""
        if self.tp.size == 1:
            return embedding(input_ids, self.weight)
        elsewhere = (input_ids < self.start) | (input_ids >= self.stop)
        local_ids = (input_ids - self.start).masked_fill(elsewhere, 0)
        embedded = embedding(local_ids, self.weight)
        out = self.tp.empty(len(embedded), embedded.shape[1], embedded.dtype)
        zero = torch.zeros((), dtype=embedded.dtype, device=embedded.device)
        return self.tp.all_reduce(torch.where(elsewhere[:, None], zero, embedded, out=out))

    def logits(self, hidden_states: Tensor, norm: "RMSNorm", out: Tensor | None = None) -> Tensor:
        """Return this rank's logits for the norm of hidden_states [num_rows, hidden_size].

        The logits are float32 [num_rows, rows of `weight`], undefined after the end of the
        vocabulary. out: contiguous memory of the result.
        """
        return norm_linear(hidden_states, norm.weight, norm.eps, self.weight, torch.float32, out)

    def join(self, logits: Tensor) -> Tensor | None:
        """Join all ranks' `logits` on rank 0: [num_rows, vocab_size]; None on other ranks."""
        joined = logits if self.tp.size == 1 else self.tp.gather(logits)
        return None if joined is None else joined[:, : self.vocab_size]


class Parameter(Layer):
    """Weight of another kind than a matrix, or one that every rank has as a whole."""

    weight: nn.Parameter


class RMSNorm(Layer):
    """Weight of a norm, which the next layer applies."""

    weight: nn.Parameter

    def __init__(self, tp: TensorParallel, weight: Weight, eps: float) -> None:
        super().__init__(tp, [weight])
        self.eps = eps


def add_weight(layer: Any, *shape: int, weight_format: WeightFormat | None) -> None:
    """Make a layer's `weight`, [..., out_features, in_features]; without a format it has 16 bits.

    On a CPU, a weight of integers has 16 bits unless compiled layers use it.
    """
    if weight_format is None:
        layer.weight = parameter(*shape)
    elif weight_format.is_fp8:
        _add_fp8_weight(layer, *shape, in_blocks=weight_format.scales == "blocks")
    elif stays_packed():
        _add_packed_weight(layer, *shape, weight_format=weight_format)
    elif group := cpu_group(shape, weight_format):
        _add_integers(layer, *shape, bits=weight_format.bits, group_size=group)
    else:
        layer.weight = parameter(*shape)


def stays_packed() -> bool:
    """Return True if products on torch's default device support packed integers."""
    return torch.get_default_device().type != "cpu"


@contextmanager
def with_integers() -> Iterator[None]:
    """Make weights of integers on a CPU, if possible, for products of compiled layers."""
    token = _takes_integers.set(True)
    try:
        yield
    finally:
        _takes_integers.reset(token)


def cpu_group(shape: Sequence[int], weight_format: WeightFormat) -> int:
    """Return the columns of a group in `Integers`, or 0 if the weight can't be stored as such."""
    if not _takes_integers.get() or len(shape) > 2 or weight_format.act_order:
        return 0
    return fitting_group(shape[1], weight_format.group_size or shape[1])


def _add_integers(layer: Any, rows: int, columns: int, *, bits: int, group_size: int) -> None:
    codes = torch.int8 if bits == 8 else torch.uint8
    layer.codes = parameter(rows, columns * bits // 8, dtype=codes)
    layer.scale = parameter(rows, columns // group_size, 2, dtype=torch.float32)
    layer.weight = Integers(layer.codes, layer.scale)


def dequantize(model: nn.Module) -> None:
    """Replace `Integers`, which only compiled layers multiply, by float matrices."""
    for layer in model.modules():
        weight: Any = getattr(layer, "weight", None)
        if isinstance(weight, Integers):
            del layer.codes, layer.scale, layer.weight
            layer.weight = nn.Parameter(weight.dequantized(), requires_grad=False)


def _add_fp8_weight(layer: Any, *shape: int, in_blocks: bool) -> None:
    *others, rows, columns = shape
    blocks = -(-rows // BLOCK), -(-columns // BLOCK)
    layer.values = parameter(*shape, dtype=FP8)
    layer.scale = parameter(*others, *(blocks if in_blocks else (rows,)), dtype=torch.float32)
    layer.weight = Quantized(layer.values, layer.scale)


def _add_packed_weight(layer: Any, *shape: int, weight_format: WeightFormat) -> None:
    *others, rows, columns = shape
    group_size = weight_format.group_size or columns
    blocks, groups = num_groups(columns, PACKED_BLOCK), num_groups(columns, group_size)
    words = *others, blocks, rows, 4 * weight_format.bits
    layer.words = parameter(*words, dtype=torch.int32)
    layer.groups = parameter(*others, groups, rows, dtype=torch.int32)
    order = None
    if weight_format.act_order:
        order = layer.order = parameter(*others, columns, dtype=torch.int32)
    layer.weight = Packed(layer.words, layer.groups, order, columns, group_size)


@contextmanager
def without_memory() -> Iterator[None]:
    """Make parameters without memory, which have only a type and a shape."""
    token = _has_memory.set(False)
    try:
        yield
    finally:
        _has_memory.reset(token)


def parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Return a parameter whose values are loaded later."""
    if _has_memory.get():
        return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
    return nn.Parameter(torch.zeros((), dtype=dtype).expand(shape), requires_grad=False)
