"""Compiled functions of a step on a CPU before and after the layers, and whole decode steps.

A step of a small model takes less time than Python needs to prepare and check its arguments. The
arguments of a step of decoding rows are therefore prepared only once.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.cpu.compiled_layers import ROWS_OF_STATES, CompiledLayers
from penstock.kernels.cpu.compiler import load
from penstock.kernels.cpu.llvm_step import build_step
from penstock.kernels.cpu.types import PLAN, HeadFields, Matrix, SampleFields, StepFields
from penstock.kernels.layouts.forward_batch import SMALL_TILE, BatchShape
from penstock.kernels.layouts.kv_cache import KVCache
from penstock.kernels.layouts.sampling import SamplingTensors, column
from penstock.kernels.layouts.states import States, StateStep
from penstock.kernels.layouts.step import Slots, StepBuffers

Floats = NDArray[np.float32]
Fields = NDArray[np.int64]
FEW = 1024  # number of the likeliest tokens, which usually suffice for top-p
GROUP = 64  # scores of which only the largest is compared at first


@functools.cache
def compiled_step() -> "CompiledStep":
    """Return the functions for this CPU. Raises OSError, RuntimeError."""
    return CompiledStep()


class CompiledStep:
    """Application of plans, and sampling."""

    def __init__(self) -> None:
        """Compile for this CPU. Raises OSError, RuntimeError."""
        self._library = load(lambda cpu: str(build_step(cpu)), "step")
        # takes the address of fields as PLAN names them
        self.call_apply_plan = self._library.function("apply_plan", 1)
        self.call_sample = self._library.function("sample", 1)  # takes the address of SampleFields

    def apply_plan(
        self, record: Tensor, slots: Slots, buffers: StepBuffers, shape: BatchShape, block_size: int
    ) -> None:
        """Compute `penstock.kernels.step.apply_plan.apply_plan`."""
        fields = self.plan_fields(record.data_ptr(), slots, buffers, shape, block_size)
        self.call_apply_plan(fields.ctypes.data)

    def plan_fields(
        self, record: int, slots: Slots, buffers: StepBuffers, shape: BatchShape, block_size: int
    ) -> Fields:
        """Return the arguments of `apply_plan` with PLAN's names; record: address of the record."""
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
    """Return the arguments of the compiled `sample`, except thresholds and result."""
    return SampleFields(
        logits=logits.data_ptr(),
        stride=logits.stride(0),
        vocab_size=logits.shape[1],
        num_rows=len(logits),
        slots=slots.data_ptr(),
        positions=positions.data_ptr(),
        parameters=by_slot.parameters.data_ptr(),
        last_token=by_slot.last_token.data_ptr(),
    )


class Restrictions(NamedTuple):
    """Parameters that remove tokens, by slot."""

    temperature: Floats
    top_k: NDArray[np.int32]
    top_p: Floats
    min_p: Floats

    @classmethod
    def of(cls, by_slot: SamplingTensors) -> "Restrictions":
        """Return views of the slot table."""
        return cls(*(column(by_slot.parameters, name).numpy() for name in cls._fields))

    def by_slot(self) -> NDArray[np.bool_]:
        """Return a mask of the slots whose parameters remove tokens."""
        removes = (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)
        return removes & (self.temperature > 0)

    def thresholds(self, logits: Floats, slots: NDArray[np.int64]) -> Floats:
        """Return the lowest score of each row that top-k, top-p and min-p keep, or -inf.

        A threshold of -inf keeps all tokens. See
        `penstock.kernels.sampling.reference.keep_top_k_top_p`.
        """
        lowest = np.full(len(slots), -np.inf, np.float32)
        for row in np.flatnonzero(self.by_slot()[slots] & (slots >= 0)).tolist():
            largest, slot = logits[row].max(), slots[row]
            if np.isfinite(largest):  # otherwise no token can be drawn in this row
                scores = logits[row] - largest
                scores /= self.temperature[slot]
                others = self.top_p[slot], self.min_p[slot]
                lowest[row] = _threshold(scores, int(self.top_k[slot]), *others)
        return lowest


def _threshold(scores: Floats, top_k: int, top_p: np.float32, min_p: np.float32) -> float:
    if 0 < top_k < len(scores):
        scores = _likeliest(scores, top_k)
        scores = scores[scores >= np.partition(scores, -top_k)[-top_k]]
    if top_p < 1:
        scores = _nucleus(scores, top_p)
    likely = np.exp(scores) >= min_p  # the largest score is 0
    return float(scores[likely | (scores == 0)].min())


def _likeliest(scores: Floats, number: int) -> Floats:
    """Return the `number` largest scores, and perhaps more; all that are left out are smaller."""
    num_groups = len(scores) // GROUP
    if num_groups < number:
        return scores
    largest = scores[: num_groups * GROUP].reshape(GROUP, num_groups).max(0)
    likely: Floats = scores[scores >= np.partition(largest, -number)[-number]]
    return likely


def _nucleus(scores: Floats, top_p: np.float32) -> Floats:
    """Return the likeliest scores whose probabilities sum to top_p, largest first.

    Only as many scores are sorted as necessary.
    """
    total = np.exp(scores).sum()
    for number in FEW, len(scores):
        ordered = np.sort(_likeliest(scores, number))[::-1]
        weights = np.exp(ordered) / total
        is_kept = weights.cumsum() - weights < top_p
        if not is_kept.all():
            return ordered[: max(1, is_kept.argmin())]
    return ordered


RECORD, PLAN_ROWS, PLAN_TOKENS = (PLAN.index(n) for n in ("record", "num_rows", "num_tokens"))
STEP_ROWS, STEP_TOKENS = (StepFields._fields.index(name) for name in ("num_rows", "num_tokens"))
STEP_DECODE = StepFields._fields.index("num_decode")
STEP_STATES = [(StepFields._fields.index(name), name) for name in ROWS_OF_STATES]
HEAD_ROWS = HeadFields._fields.index("num_rows")
SAMPLE_ROWS, THRESHOLDS, OUT = (
    SampleFields._fields.index(name) for name in ("num_rows", "thresholds", "out")
)


class DecodeStep:
    """A step of decoding rows without logits processing, from the plan to sampling.

    It applies the plan and computes layers, output layer and sampling, as the model runner does in
    separate calls.
    """

    def __init__(
        self,
        layers: CompiledLayers,
        step: CompiledStep,
        *,
        num_layers: int,
        embedding: Tensor,
        norm: Tensor,
        eps: float,
        head: Matrix,
        rope: Tensor,
        kv_caches: Sequence[KVCache],
        states: States | None,
        slots: Slots,
        buffers: StepBuffers,
    ) -> None:
        """Allocate memory for steps of all slots; the tensors must keep their addresses."""
        self._layers, self._step = layers, step
        self._halves = range(2 * num_layers)
        num_rows, hidden = len(slots.parameters), embedding.shape[1]
        self._shape = BatchShape(num_rows, num_rows, num_rows, 0, SMALL_TILE, 1, 0)
        self._rope, self._kv_caches, self._buffers = rope, kv_caches, buffers
        self._states = states
        numbers = torch.zeros(len(StateStep._fields) - 1, num_rows, dtype=torch.int64)
        self._any_step = states and StateStep(states.layers, *numbers)  # to prepare the arguments
        self._residual = torch.empty(num_rows, hidden)
        self.logits = torch.empty(num_rows, len(head))  # logits of the last step's rows
        self._head = self._residual, norm, torch.tensor(eps, dtype=torch.float32), head
        self._embedding = embedding
        by_slot = slots.sampling()
        self._restrictions = Restrictions.of(by_slot)
        self._parameters: list[bytes] = []  # parameters of all slots in the last step
        self._unrestricted = np.full(num_rows, -np.inf, np.float32)
        self._views = self.logits.numpy(), buffers.slots.numpy()
        block_size = kv_caches[0].k.shape[1]
        self._plan = step.plan_fields(0, slots, buffers, self._shape, block_size)
        self._sample = np.array(
            sample_fields(self.logits, buffers.slots, buffers.next_positions, by_slot), np.int64
        )
        self._version = -1

    def _prepare(self) -> None:
        """Prepare the arguments that contain addresses of the layers' memory."""
        layers, residual = self._layers, self._residual.data_ptr()
        batch = self._buffers.forward_batch(self._shape)._replace(states=self._any_step)
        fields = layers.begin(batch, self._rope, self._kv_caches)
        fields = fields._replace(residual=residual, target=residual)
        self._fields: Fields = np.array(fields, np.int64)
        self._head_fields: Fields = np.array(layers.head_fields(*self._head, self.logits), np.int64)
        addresses = self._plan, self._fields, self._head_fields, self._sample
        self._addresses = [fields.ctypes.data for fields in addresses]
        tensors = self._buffers.input_ids, self._embedding, self._residual
        self._embed = [tensor.data_ptr() for tensor in tensors]
        self._version = layers.version

    def __call__(self, record: NDArray[np.int32], num_rows: int) -> list[int]:
        """Run the step described by the record; return the rows' tokens as `sample` does."""
        layers, step = self._layers, self._step
        if layers.version != self._version:
            self._prepare()
        plan, decoder, head, sample = self._addresses
        self._plan[RECORD] = record.ctypes.data
        self._plan[PLAN_ROWS] = self._plan[PLAN_TOKENS] = num_rows
        step.call_apply_plan(plan)
        layers.call_embed(self._embed, num_rows)
        self._fields[STEP_ROWS] = self._fields[STEP_TOKENS] = num_rows
        states = self._states and self._begin_states(self._states, num_rows)
        layers.call_decoder(decoder, self._halves, num_rows)
        if self._states and states:
            self._states.end(states, self._buffers.decode_lens[:num_rows])
        self._head_fields[HEAD_ROWS] = num_rows
        layers.call_head(head, self.logits.shape[1], num_rows)
        tokens, lowest = np.zeros(num_rows, np.int64), self._thresholds(num_rows)
        self._sample[SAMPLE_ROWS] = num_rows
        self._sample[THRESHOLDS], self._sample[OUT] = lowest.ctypes.data, tokens.ctypes.data
        step.call_sample(sample)
        token_ids: list[int] = tokens.tolist()
        return token_ids

    def _begin_states(self, states: States, num_rows: int) -> StateStep:
        of_rows = self._buffers.states, self._buffers.context_lens, self._buffers.prompt_ends
        packed, ends, prompt_ends = (tensor[:num_rows] for tensor in of_rows)
        bounds = torch.arange(num_rows + 1, dtype=torch.int32)  # a token a row
        step = states.begin(packed, bounds, ends, prompt_ends)
        self._fields[STEP_DECODE] = num_rows
        for index, name in STEP_STATES:
            self._fields[index] = getattr(step, name).data_ptr()
        return step

    def _thresholds(self, num_rows: int) -> Floats:
        """Return the lowest score that each row keeps; usually the parameters are unchanged."""
        parameters = [array.tobytes() for array in self._restrictions]
        if parameters != self._parameters:
            self._parameters = parameters
            self._is_restricted = self._restrictions.by_slot().any()
        if not self._is_restricted:
            return self._unrestricted
        logits, slots = self._views
        return self._restrictions.thresholds(logits[:num_rows], slots[:num_rows])
