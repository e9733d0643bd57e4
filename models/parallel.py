"""Layers cut across the ranks of a tensor-parallel group (Megatron-LM, arXiv:1909.08053).

Each layer says which part of which checkpoint tensor its weights are made of: `slices`. Layers are
built on torch's default device, in its default dtype, for inference only.
"""

import atexit
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.kernels.embedding import embedding
from penstock.kernels.linear import linear, linear_add, norm_linear

TIMEOUT = timedelta(seconds=120)
"""after which a rank that the others wait for is given up"""

CPU = torch.device("cpu")


class GroupError(ConnectionError):
    """A rank of the group is gone, so that nothing can be computed any more."""


class TensorParallel:
    """One rank of a tensor-parallel group. Alone (size 1) it exchanges nothing."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @classmethod
    def join(
        cls, rendezvous: str, rank: int, size: int, device: torch.device = CPU
    ) -> "TensorParallel":
        """Waits for the other ranks at `rendezvous`, tcp://host:port. Raises GroupError."""
        group = cls(rank, size)
        if size > 1:
            backend = "nccl" if device.type == "cuda" else "gloo"
            with group._exchange():
                dist.init_process_group(backend, rendezvous, TIMEOUT, size, rank)
            # gloo's threads must end before the interpreter does, or they abort it
            atexit.register(dist.destroy_process_group)
        return group

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks, on all of them; `x` is overwritten."""
        if self.size == 1:
            return x
        if x.is_cuda:
            with self._exchange():
                dist.all_reduce(x)
            return x
        # Added in the order of the ranks: where gloo starts to add depends on the tensor's size.
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with self._exchange():
            dist.all_gather(parts, x.contiguous())
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total

    def gather(self, x: Tensor) -> Tensor | None:
        """On rank 0 all ranks' x, joined at the last dimension; None on the others."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        with self._exchange():
            dist.gather(x.contiguous(), parts)
        return None if parts is None else torch.cat(parts, dim=-1)

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's x, on all ranks; those of the others are overwritten."""
        if self.size > 1:
            with self._exchange():
                dist.broadcast(x, src=0)
        return x

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise GroupError(f"rank {self.rank} of {self.size} lost its group: {reason}") from error


class Slice(NamedTuple):
    """What one rank takes of a tensor of the checkpoint."""

    name: str
    shape: tuple[int, ...]
    """of the whole tensor"""
    dim: int
    """the dimension that is cut"""
    start: int
    stop: int
    target: Tensor
    """where it goes; of the slice's shape"""


class Layer(nn.Module, ABC):
    """A layer with a `weight`, made of tensors of the checkpoint."""

    weight: nn.Parameter

    @abstractmethod
    def slices(self, name: str) -> Iterator[Slice]:
        """What this rank's weight is made of; `name` is the layer's own, as `model.norm`."""


class ColumnParallelLinear(Layer):
    """Linear layers of one input, side by side; each rank has its share of every one's outputs."""

    def __init__(self, tp: TensorParallel, in_features: int, outputs: dict[str, int]) -> None:
        """outputs: the layers' names in the checkpoint → their numbers of output features."""
        super().__init__()
        self.tp = tp
        self.outputs = outputs
        self.sizes = [size // tp.size for size in outputs.values()]
        """this rank's output features of each layer"""
        self.weight = _parameter(sum(self.sizes), in_features)

    def forward(self, x: Tensor, norm: "RMSNorm") -> Tensor:
        """The layers of the norm of x: [num_tokens, in_features] → [num_tokens, sum of `sizes`]."""
        return norm_linear(x, norm.weight, norm.eps, self.weight)

    def slices(self, name: str) -> Iterator[Slice]:
        """Rows of each layer's weight."""
        parent = name.rpartition(".")[0]
        targets = torch.split(self.weight, self.sizes)
        for (layer, num_rows), size, target in zip(
            self.outputs.items(), self.sizes, targets, strict=True
        ):
            shape = (num_rows, self.weight.shape[1])
            start = self.tp.rank * size
            yield Slice(f"{parent}.{layer}.weight", shape, 0, start, start + size, target)


class RowParallelLinear(Layer):
    """A linear layer whose inputs are spread over the ranks; every rank has the whole output."""

    def __init__(self, tp: TensorParallel, in_features: int, out_features: int) -> None:
        super().__init__()
        self.tp = tp
        self.in_features = in_features
        self.weight = _parameter(out_features, in_features // tp.size)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + layer: [num_tokens, in_features / size] → [num_tokens, out_features]."""
        if self.tp.size == 1:
            return linear_add(x, self.weight, residual)
        return residual + self.tp.all_reduce(linear(x, self.weight))

    def slices(self, name: str) -> Iterator[Slice]:
        """Columns of the weight."""
        out_features, size = self.weight.shape
        shape = (out_features, self.in_features)
        start = self.tp.rank * size
        yield Slice(f"{name}.weight", shape, 1, start, start + size, self.weight)


class VocabParallelEmbedding(Layer):
    """Token embeddings, each rank with a run of the vocabulary; also the head that scores tokens.

    Where the vocabulary does not divide by the size of the group, the last ranks' rows are filled
    up with zeros.
    """

    def __init__(self, tp: TensorParallel, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.tp = tp
        self.vocab_size = vocab_size
        num_rows = -(-vocab_size // tp.size)
        self.start = min(tp.rank * num_rows, vocab_size)
        self.stop = min(self.start + num_rows, vocab_size)
        self.weight = _parameter(num_rows, hidden_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids int64 [num_tokens] → [num_tokens, hidden_size]."""
        if self.tp.size == 1:
            return embedding(input_ids, self.weight)
        elsewhere = (input_ids < self.start) | (input_ids >= self.stop)
        local_ids = (input_ids - self.start).masked_fill(elsewhere, 0)
        embedded = embedding(local_ids, self.weight)
        return self.tp.all_reduce(embedded.masked_fill(elsewhere[:, None], 0))

    def logits(self, hidden_states: Tensor, norm: "RMSNorm") -> Tensor | None:
        """Scores of the norm of hidden_states [num_rows, hidden_size].

        On rank 0 float32 [num_rows, vocab_size]; None on the others.
        """
        logits = self.tp.gather(
            norm_linear(hidden_states, norm.weight, norm.eps, self.weight, torch.float32)
        )
        return None if logits is None else logits[:, : self.vocab_size]

    def slices(self, name: str) -> Iterator[Slice]:
        """Rows of the weight; fewer than it has on the last ranks."""
        shape = (self.vocab_size, self.weight.shape[1])
        target = self.weight[: self.stop - self.start]
        yield Slice(f"{name}.weight", shape, 0, self.start, self.stop, target)


class RMSNorm(Layer):
    """The weight of a norm, whole on every rank; what comes behind it applies it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _parameter(size)

    def slices(self, name: str) -> Iterator[Slice]:
        """All of it."""
        (size,) = self.weight.shape
        yield Slice(f"{name}.weight", (size,), 0, 0, size, self.weight)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape), requires_grad=False)
