"""Back ends that a process has chosen in place of the portable kernels; none by default.

`penstock.kernels.extras` lists the back ends. A process chooses them before the first step: CUDA
graphs keep the kernels with which they were captured.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from penstock.kernels.layouts.forward_batch import BatchShape
from penstock.kernels.layouts.sampling import SamplingTensors
from penstock.kernels.layouts.step import Slots, StepBuffers


class CompiledStep(NamedTuple):
    """CPU functions around the layers of a step, in place of torch and numpy."""

    # like `penstock.kernels.step.apply_plan`
    apply_plan: Callable[[Tensor, Slots, StepBuffers, BatchShape, int], None]
    # like `penstock.kernels.sampling.reference.sample`
    sample: Callable[[Tensor, Tensor, Tensor, SamplingTensors], Tensor]


class SharedRanks(Protocol):
    """View that a rank has of memory shared with the other ranks of its machine."""

    part_bytes: int  # bytes of a rank's part

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return every rank's x, of up to `part_bytes`; the views are valid until the next call."""

    def end(self) -> None:
        """Let the calls of every rank fail from now on."""


class RankMemory(NamedTuple):
    """Memory in which ranks on CPUs of one machine exchange tensors, in place of sockets."""

    # total bytes, from the number of ranks and the bytes of a rank's part
    num_bytes: Callable[[int, int], int]
    # a rank's view, from the memory, the rank, and the number of ranks
    view: Callable[[Tensor, int, int], SharedRanks]


class Deterministic(NamedTuple):
    """GPU kernels that compute each row with the same bits in every batch."""

    multiply: Callable[..., Tensor]  # like `penstock.kernels.linear.small_m_gemm.multiply`
    decode: Callable[..., Any]  # makes a `penstock.kernels.attention.triton_decode.DecodeAttention`
    # like `penstock.kernels.attention.triton_prefill.PrefillAttention`
    prefill: Callable[..., None]


class BackEnds:
    """Back ends chosen by this process."""

    compiled_step: CompiledStep | None = None
    rank_memory: RankMemory | None = None
    deterministic: Deterministic | None = None


CHOSEN = BackEnds()


def is_deterministic() -> bool:
    """Return True if a row's bits must not depend on the other rows."""
    return CHOSEN.deterministic is not None
