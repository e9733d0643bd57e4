"""Layers cut across the ranks of a tensor-parallel group (Megatron-LM, arXiv:1909.08053).

`slices` of a layer yields the parts of checkpoint tensors of which its weight consists. Layers are
built on torch's default device, in its default dtype, for inference only.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.kernels.elementwise import embedding
from penstock.kernels.layouts.sampling import shard_size
from penstock.kernels.linear.linear import linear, linear_add, norm_linear
from penstock.kernels.matrices import Matrix, Rows
from penstock.kernels.packed.matrices import Integers
from penstock.models.allocation import add_weight, parameter
from penstock.models.tensor_parallel import TensorParallel
from penstock.protocol.quantization import FP8_ROWS, WeightFormat


class Slice(NamedTuple):
    """The part of a checkpoint tensor that one rank loads."""

    name: str
    shape: tuple[int, ...]  # shape of the whole tensor
    dim: int  # the dimension that is cut
    start: int
    stop: int
    target: Matrix | Integers  # destination, of the slice's shape


class Layer(nn.Module, ABC):
    """A layer whose `weight` consists of checkpoint tensors."""

    weight: Matrix  # or `Integers`, which only compiled layers multiply

    @abstractmethod
    def slices(self, name: str) -> Iterator[Slice]:
        """Yield the parts of this rank's weight; name: of the layer, such as `model.norm`."""


class ColumnParallelLinear(Layer):
    """Adjacent linear layers of one input; each rank has a share of every layer's outputs."""

    def __init__(
        self,
        tp: TensorParallel,
        in_features: int,
        outputs: dict[str, int],
        num_parts: dict[str, int] | None = None,
        weight_format: WeightFormat | None = None,
    ) -> None:
        """Allocate the weight.

        outputs: names of the layers in the checkpoint → output features. num_parts: layers that
        can't be cut into a part for each rank → number of parts; adjacent ranks share a part.
        """
        super().__init__()
        self.tp = tp
        self.outputs = outputs
        self.num_parts = dict.fromkeys(outputs, tp.size) | (num_parts or {})
        # this rank's output features of each layer
        self.sizes = [size // self.num_parts[layer] for layer, size in outputs.items()]
        after = weight_format and weight_format.after_cut(self.sizes)
        add_weight(self, sum(self.sizes), in_features, weight_format=after)

    def forward(self, x: Tensor, norm: "RMSNorm") -> Tensor:
        """Return the layers of norm(x), x [num_tokens, in_features]: [num_tokens, sum(sizes)]."""
        return norm_linear(x, norm.weight, norm.eps, self.weight)

    def slices(self, name: str) -> Iterator[Slice]:
        """Yield rows of each layer's weight."""
        parent = name.rpartition(".")[0]
        targets = self.weight.split(self.sizes)
        for (layer, num_rows), size, target in zip(
            self.outputs.items(), self.sizes, targets, strict=True
        ):
            shape = (num_rows, self.weight.shape[1])
            start = self.tp.rank * self.num_parts[layer] // self.tp.size * size
            yield Slice(f"{parent}.{layer}.weight", shape, 0, start, start + size, target)


class RowParallelLinear(Layer):
    """A linear layer whose inputs are divided among the ranks; every rank has the whole output."""

    def __init__(
        self,
        tp: TensorParallel,
        in_features: int,
        out_features: int,
        weight_format: WeightFormat | None = None,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.in_features = in_features
        size = in_features // tp.size
        if weight_format and tp.size > 1:
            weight_format = weight_format.after_cut(columns=size)
        add_weight(self, out_features, size, weight_format=weight_format)

    def forward(self, x: Rows, residual: Tensor) -> Tensor:
        """Return residual plus the layer of x [num_tokens, in_features / tp size]."""
        if self.tp.size == 1:
            return linear_add(x, self.weight, residual)
        num_rows, num_columns = residual.shape
        out = self.tp.empty(num_rows, num_columns, residual.dtype)
        return self.tp.all_reduce(linear(x, self.weight, out), residual)

    def slices(self, name: str) -> Iterator[Slice]:
        """Yield columns of the weight."""
        out_features, size = self.weight.shape
        shape = (out_features, self.in_features)
        start = self.tp.rank * size
        yield Slice(f"{name}.weight", shape, 1, start, start + size, self.weight)


class ParallelLMHead(Layer):
    """The output layer; each rank has a shard of the vocabulary.

    On GPUs the vocabulary is cut between the sampler's runs of token ids. The last ranks' rows are
    padded with zeros.
    """

    def __init__(
        self,
        tp: TensorParallel,
        vocab_size: int,
        hidden_size: int,
        is_fp8: bool = False,
        source: str | None = None,
    ) -> None:
        """Allocate the weight; source: another layer of the checkpoint that has this weight."""
        super().__init__()
        self.tp = tp
        self.vocab_size = vocab_size
        self.source = source
        num_rows = -(-vocab_size // tp.size)
        if tp.on_gpus:
            num_rows = shard_size(vocab_size, tp.size)
        self.start = min(tp.rank * num_rows, vocab_size)
        self.stop = min(self.start + num_rows, vocab_size)
        weight_format = FP8_ROWS if is_fp8 else None
        add_weight(self, num_rows, hidden_size, weight_format=weight_format)

    def logits(self, hidden_states: Tensor, norm: "RMSNorm", out: Tensor | None = None) -> Tensor:
        """Return this rank's logits for the norm of hidden_states [num_rows, hidden_size].

        float32 [num_rows, rows of `weight`], undefined after the end of the vocabulary; out:
        contiguous memory of the result.
        """
        return norm_linear(hidden_states, norm.weight, norm.eps, self.weight, torch.float32, out)

    def join(self, logits: Tensor) -> Tensor | None:
        """Join all ranks' `logits` on rank 0: [num_rows, vocab_size]; None on the others."""
        joined = logits if self.tp.size == 1 else self.tp.gather(logits)
        return None if joined is None else joined[:, : self.vocab_size]

    def slices(self, name: str) -> Iterator[Slice]:
        """Yield rows of the weight; fewer than allocated on the last ranks."""
        num_rows, hidden_size = self.weight.shape
        num_own = self.stop - self.start
        target, _ = self.weight.split([num_own, num_rows - num_own])
        shape = (self.vocab_size, hidden_size)
        yield Slice(f"{self.source or name}.weight", shape, 0, self.start, self.stop, target)


class VocabParallelEmbedding(ParallelLMHead):
    """Token embeddings, sharded over the ranks; may also be the output layer."""

    weight: nn.Parameter

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings [num_tokens, hidden_size] of input_ids, int64 [num_tokens]."""
        if self.tp.size == 1:
            return embedding(input_ids, self.weight)
        elsewhere = (input_ids < self.start) | (input_ids >= self.stop)
        local_ids = (input_ids - self.start).masked_fill(elsewhere, 0)
        embedded = embedding(local_ids, self.weight)
        out = self.tp.empty(len(embedded), embedded.shape[1], embedded.dtype)
        zero = torch.zeros((), dtype=embedded.dtype, device=embedded.device)
        return self.tp.all_reduce(torch.where(elsewhere[:, None], zero, embedded, out=out))


class WholeLayer(Layer):
    """A weight that every rank has as a whole."""

    weight: nn.Parameter

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = parameter(*shape)

    def slices(self, name: str) -> Iterator[Slice]:
        yield Slice(f"{name}.weight", self.weight.shape, 0, 0, len(self.weight), self.weight)


class RMSNorm(WholeLayer):
    """The weight of a norm; the next layer applies it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size)
        self.eps = eps
