"""Back ends that a process has chosen in place of the portable kernels; none by default.

`penstock.kernels.extras` lists them. They are chosen before the first step: CUDA graphs keep the
kernels with which they were captured.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from penstock.kernels.layouts.forward_batch import BatchShape
from penstock.kernels.layouts.sampling import SamplingTensors
from penstock.kernels.layouts.step import Slots, StepBuffers


class CompiledStep(NamedTuple):
    """Functions of a CPU around the layers of a step, in place of torch and numpy."""

    # as `penstock.kernels.step.apply_plan`
    apply_plan: Callable[[Tensor, Slots, StepBuffers, BatchShape, int], None]
    # as `penstock.kernels.sampling.reference.sample`
    sample: Callable[[Tensor, Tensor, Tensor, SamplingTensors], Tensor]


class SharedRanks(Protocol):
    """A rank's view of memory that it shares with the other ranks of its machine."""

    part_bytes: int  # of a rank

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return every rank's x, up to `part_bytes`; views until the next call."""

    def end(self) -> None:
        """Let every rank's calls fail from now on."""


class RankMemory(NamedTuple):
    """Memory in which ranks on CPUs of one machine exchange tensors, in place of sockets."""

    num_bytes: Callable[[int, int], int]  # of the number of ranks, and of a rank's part
    # the view of a rank, from the memory, the rank, and the number of ranks
    view: Callable[[Tensor, int, int], SharedRanks]


class Deterministic(NamedTuple):
    """Kernels of a GPU that compute each row with the same bits in every batch."""

    multiply: Callable[..., Tensor]  # as `penstock.kernels.linear.small_m_gemm.multiply`
    decode: Callable[..., Any]  # makes a `penstock.kernels.attention.triton_decode.DecodeAttention`
    prefill: Callable[..., None]  # as `penstock.kernels.attention.backends.triton_prefill`


class BackEnds:
    """The choice of this process."""

    compiled_step: CompiledStep | None = None
    rank_memory: RankMemory | None = None
    deterministic: Deterministic | None = None


CHOSEN = BackEnds()


def is_deterministic() -> bool:
    """Return True if a row's bits must not depend on the other rows."""
    return CHOSEN.deterministic is not None
