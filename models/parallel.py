"""Layers cut across the ranks of a tensor-parallel group (Megatron-LM, arXiv:1909.08053).

Each layer says which part of which checkpoint tensor its weights are made of: `slices`. Layers are
built on torch's default device, in its default dtype, for inference only.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from penstock.kernels.elementwise.elementwise import embedding
from penstock.kernels.linear.linear import linear, linear_add, norm_linear
from penstock.kernels.quantize.types import BLOCK, FP8, Matrix, Quantized
from penstock.kernels.sampling.sampling import shard_size
from penstock.models.tensor_parallel import TensorParallel

Fp8 = Literal["", "rows", "blocks"]
"""what has scales in a weight of 8 bits; "": it is not in 8 bits"""


class Slice(NamedTuple):
    """What one rank takes of a tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]
    """of the whole tensor"""
    dim: int
    """the dimension that is cut"""
    start: int
    stop: int
    target: Matrix
    """where it goes; of the slice's shape"""


class Layer(nn.Module, ABC):
    """A layer with a `weight`, made of tensors of the checkpoint."""

    weight: Matrix

    @abstractmethod
    def slices(self, name: str) -> Iterator[Slice]:
        """What this rank's weight is made of; `name` is the layer's own, as `model.norm`."""


class ColumnParallelLinear(Layer):
    """Linear layers of one input, side by side; each rank has its share of every one's outputs."""

    def __init__(
        self,
        tp: TensorParallel,
        in_features: int,
        outputs: dict[str, int],
        num_parts: dict[str, int] | None = None,
        fp8: Fp8 = "",
    ) -> None:
        """outputs: the layers' names in the checkpoint → their numbers of output features;
        num_parts: the layers that can't be cut into a part for each rank → into how many they can,
        each of which neighbours among the ranks have alike."""
        super().__init__()
        self.tp = tp
        self.outputs = outputs
        self.num_parts = dict.fromkeys(outputs, tp.size) | (num_parts or {})
        self.sizes = [size // self.num_parts[layer] for layer, size in outputs.items()]
        """this rank's output features of each layer"""
        add_weight(self, sum(self.sizes), in_features, fp8=kept(fp8, *self.sizes))

    def forward(self, x: Tensor, norm: "RMSNorm") -> Tensor:
        """The layers of the norm of x: [num_tokens, in_features] → [num_tokens, sum of `sizes`]."""
        return norm_linear(x, norm.weight, norm.eps, self.weight)

    def slices(self, name: str) -> Iterator[Slice]:
        """Rows of each layer's weight."""
        parent = name.rpartition(".")[0]
        targets = self.weight.split(self.sizes)
        for (layer, num_rows), size, target in zip(
            self.outputs.items(), self.sizes, targets, strict=True
        ):
            shape = (num_rows, self.weight.shape[1])
            start = self.tp.rank * self.num_parts[layer] // self.tp.size * size
            yield Slice(f"{parent}.{layer}.weight", shape, 0, start, start + size, target)


class RowParallelLinear(Layer):
    """A linear layer whose inputs are spread over the ranks; every rank has the whole output."""

    def __init__(
        self, tp: TensorParallel, in_features: int, out_features: int, fp8: Fp8 = ""
    ) -> None:
        super().__init__()
        self.tp = tp
        self.in_features = in_features
        size = in_features // tp.size
        add_weight(self, out_features, size, fp8=fp8 if tp.size == 1 else kept(fp8, size))

    def forward(self, x: Matrix, residual: Tensor) -> Tensor:
        """residual + layer: [num_tokens, in_features / size] → [num_tokens, out_features]."""
        if self.tp.size == 1:
            return linear_add(x, self.weight, residual)
        num_rows, num_columns = residual.shape
        out = self.tp.empty(num_rows, num_columns, residual.dtype)
        return self.tp.all_reduce(linear(x, self.weight, out), residual)

    def slices(self, name: str) -> Iterator[Slice]:
        """Columns of the weight."""
        out_features, size = self.weight.shape
        shape = (out_features, self.in_features)
        start = self.tp.rank * size
        yield Slice(f"{name}.weight", shape, 1, start, start + size, self.weight)


class ParallelLMHead(Layer):
    """Scores tokens; each rank has a run of the vocabulary.

    On GPUs it is cut between the sampler's runs of token ids. Where it does not divide by the size
    of the group, the last ranks' rows are filled up with zeros.
    """

    def __init__(
        self,
        tp: TensorParallel,
        vocab_size: int,
        hidden_size: int,
        is_fp8: bool = False,
        source: str | None = None,
    ) -> None:
        """source: the layer of the checkpoint whose weight it takes, if that is another's."""
        super().__init__()
        self.tp = tp
        self.vocab_size = vocab_size
        self.source = source
        num_rows = -(-vocab_size // tp.size)
        if tp.on_gpus:
            num_rows = shard_size(vocab_size, tp.size)
        self.start = min(tp.rank * num_rows, vocab_size)
        self.stop = min(self.start + num_rows, vocab_size)
        add_weight(self, num_rows, hidden_size, fp8="rows" if is_fp8 else "")

    def logits(self, hidden_states: Tensor, norm: "RMSNorm", out: Tensor | None = None) -> Tensor:
        """This rank's scores of the norm of hidden_states [num_rows, hidden_size].

        float32 [num_rows, rows of `weight`], those behind the vocabulary's end void; out: where
        they go, contiguous.
        """
        return norm_linear(hidden_states, norm.weight, norm.eps, self.weight, torch.float32, out)

    def join(self, logits: Tensor) -> Tensor | None:
        """Join all ranks' `logits` on rank 0: [num_rows, vocab_size]; None on the others."""
        joined = self.tp.gather(logits)
        return None if joined is None else joined[:, : self.vocab_size]

    def slices(self, name: str) -> Iterator[Slice]:
        """Rows of the weight; fewer than it has on the last ranks."""
        num_rows, hidden_size = self.weight.shape
        num_own = self.stop - self.start
        target, _ = self.weight.split([num_own, num_rows - num_own])
        shape = (self.vocab_size, hidden_size)
        yield Slice(f"{self.source or name}.weight", shape, 0, self.start, self.stop, target)


class VocabParallelEmbedding(ParallelLMHead):
    """Token embeddings, each rank with a run of the vocabulary; may be the head, too."""

    weight: nn.Parameter

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids int64 [num_tokens] → [num_tokens, hidden_size]."""
        if self.tp.size == 1:
            return embedding(input_ids, self.weight)
        elsewhere = (input_ids < self.start) | (input_ids >= self.stop)
        local_ids = (input_ids - self.start).masked_fill(elsewhere, 0)
        embedded = embedding(local_ids, self.weight)
        out = self.tp.empty(len(embedded), embedded.shape[1], embedded.dtype)
        zero = torch.zeros((), dtype=embedded.dtype, device=embedded.device)
        return self.tp.all_reduce(torch.where(elsewhere[:, None], zero, embedded, out=out))


class RMSNorm(Layer):
    """The weight of a norm, whole on every rank; what comes behind it applies it."""

    weight: nn.Parameter

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter(size)

    def slices(self, name: str) -> Iterator[Slice]:
        """All of it."""
        (size,) = self.weight.shape
        yield Slice(f"{name}.weight", (size,), 0, 0, size, self.weight)


def kept(fp8: Fp8, *sizes: int) -> Fp8:
    """Return what has scales in a weight cut into parts of these sizes, or put together of them.

    Blocks keep theirs where each part has whole ones; elsewhere rows get scales of their own.
    """
    return "rows" if fp8 == "blocks" and any(size % BLOCK for size in sizes) else fp8


def add_weight(layer: Layer, *shape: int, fp8: Fp8) -> None:
    """Make `layer.weight`, [..., out_features, in_features]; fp8: what has scales, if anything."""
    if not fp8:
        layer.weight = parameter(*shape)
        return
    *others, rows, columns = shape
    blocks = -(-rows // BLOCK), -(-columns // BLOCK)
    layer.values = parameter(*shape, dtype=FP8)
    layer.scale = parameter(*others, *((rows,) if fp8 == "rows" else blocks), dtype=torch.float32)
    layer.weight = Quantized(layer.values, layer.scale)


def parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Of a layer, to be loaded."""
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
