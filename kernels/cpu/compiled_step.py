"""Compiled functions of a step on a CPU before and after the layers."""

import functools
import logging
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.cpu.types import SampleFields
from penstock.kernels.layouts.forward_batch import BatchShape
from penstock.kernels.layouts.sampling import SamplingTensors
from penstock.kernels.layouts.step import Slots, StepBuffers

Floats = NDArray[np.float32]
Fields = NDArray[np.int64]
log = logging.getLogger(__name__)
FEW = 1024  # likeliest tokens, among which top-p usually ends


@functools.cache
def compiled_step() -> "CompiledStep | None":
    """Return the functions, or None where code can't be compiled."""
    try:
        return CompiledStep()
    except (ImportError, OSError, RuntimeError) as error:
        log.warning("steps are prepared in numpy, not compiled: %s", error)
        return None


class CompiledStep:
    """Application of plans, and sampling."""

    def __init__(self) -> None:
        """Compile for this CPU. Raises ImportError, OSError, RuntimeError."""
        from penstock.kernels.cpu.compiler import load  # llvmlite
        from penstock.kernels.cpu.llvm_step import build_step

        self._library = load(lambda cpu: str(build_step(cpu)), "step")
        # of the address of fields as PLAN names them
        self.call_apply_plan = self._library.function("apply_plan", 1)
        self.call_sample = self._library.function("sample", 1)  # of the address of SampleFields

    def apply_plan(
        self, record: Tensor, slots: Slots, buffers: StepBuffers, shape: BatchShape, block_size: int
    ) -> None:
        """Compute `penstock.kernels.step.apply_plan.apply_plan`."""
        fields = self.plan_fields(record.data_ptr(), slots, buffers, shape, block_size)
        self.call_apply_plan(fields.ctypes.data)

    def plan_fields(
        self, record: int, slots: Slots, buffers: StepBuffers, shape: BatchShape, block_size: int
    ) -> Fields:
        """Return the arguments of `apply_plan`, as PLAN names them; record: its address."""
        sizes = shape.num_rows, shape.num_tokens, shape.num_tiles, shape.tile_size
        addresses = [tensor.data_ptr() for tensor in (*slots, *buffers)]
        max_blocks = slots.block_tables.shape[1]
        return np.array([record, block_size, max_blocks, *sizes, *addresses], np.int64)

    def sample(
        self, logits: Tensor, slots: Tensor, positions: Tensor, by_slot: SamplingTensors
    ) -> Tensor:
        """Compute `penstock.kernels.sampling.sampling.sample`."""
        out = torch.zeros(len(logits), dtype=torch.int64)
        restrictions = Restrictions.of(by_slot)
        lowest = restrictions.thresholds(logits.numpy(), slots.numpy())
        fields = sample_fields(logits, slots, positions, by_slot)._replace(
            thresholds=lowest.ctypes.data, out=out.data_ptr()
        )
        self.call_sample(np.array(fields, np.int64).ctypes.data)
        return out


def sample_fields(
    logits: Tensor, slots: Tensor, positions: Tensor, by_slot: SamplingTensors
) -> SampleFields:
    """Return the arguments of the compiled `sample`, without thresholds and result."""
    return SampleFields(
        logits=logits.data_ptr(),
        stride=logits.stride(0),
        vocab_size=logits.shape[1],
        num_rows=len(logits),
        slots=slots.data_ptr(),
        positions=positions.data_ptr(),
        seeds=by_slot.seeds.data_ptr(),
        temperature=by_slot.temperature.data_ptr(),
        last_token=by_slot.last_token.data_ptr(),
    )


class Restrictions(NamedTuple):
    """Parameters by slot that remove tokens."""

    temperature: Floats
    top_k: NDArray[np.int32]
    top_p: Floats
    min_p: Floats

    @classmethod
    def of(cls, by_slot: SamplingTensors) -> "Restrictions":
        """Return arrays in the tensors' memory."""
        return cls(*(tensor.numpy() for tensor in by_slot[1:5]))

    def by_slot(self) -> NDArray[np.bool_]:
        """Return True for slots whose parameters remove tokens."""
        removes = (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)
        return removes & (self.temperature > 0)

    def thresholds(self, logits: Floats, slots: NDArray[np.int64]) -> Floats:
        """Return the lowest score of each row that top-k, top-p and min-p keep, -inf for all.

        As in `penstock.kernels.sampling.reference.keep_top_k_top_p`.
        """
        lowest = np.full(len(slots), -np.inf, np.float32)
        for row in np.flatnonzero(self.by_slot()[slots] & (slots >= 0)).tolist():
            largest, slot = logits[row].max(), slots[row]
            if np.isfinite(largest):  # otherwise the row has no token
                scores = (logits[row] - largest) / self.temperature[slot]
                others = self.top_p[slot], self.min_p[slot]
                lowest[row] = _threshold(scores, int(self.top_k[slot]), *others)
        return lowest


def _threshold(scores: Floats, top_k: int, top_p: np.float32, min_p: np.float32) -> float:
    if 0 < top_k < len(scores):
        scores = scores[scores >= np.partition(scores, -top_k)[-top_k]]
    if top_p < 1:
        scores = _nucleus(scores, top_p)
    likely = np.exp(scores) >= min_p  # the largest score is 0
    return float(scores[likely | (scores == 0)].min())


def _nucleus(scores: Floats, top_p: np.float32) -> Floats:
    """Return the likeliest scores whose probabilities sum to top_p, with all that equal the last.

    Sorts as few as possible.
    """
    total = np.exp(scores).sum()
    for number in FEW, len(scores):
        some = scores if number >= len(scores) else np.partition(scores, -number)[-number:]
        ordered = np.sort(some)[::-1]
        weights = np.exp(ordered) / total
        is_first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
        likelier = np.maximum.accumulate(np.where(is_first, weights.cumsum() - weights, 0))
        is_kept = (likelier < top_p) | (ordered == 0)
        if not is_kept[-1]:  # nor is any score that was not sorted
            break
    kept: Floats = ordered[is_kept]
    return kept
