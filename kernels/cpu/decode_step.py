"""Steps whose rows all decode: compiled functions, whose arguments are prepared once.

A step of a small model takes less time than Python needs to prepare and check its arguments.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.cpu.compiled_layers import CompiledLayers
from penstock.kernels.cpu.compiled_step import (
    CompiledStep,
    Fields,
    Floats,
    Restrictions,
    sample_fields,
)
from penstock.kernels.cpu.types import PLAN, HeadFields, Matrix, SampleFields, StepFields
from penstock.kernels.layouts.forward_batch import SMALL_TILE, BatchShape
from penstock.kernels.layouts.kv_cache import KVCache
from penstock.kernels.layouts.step import Slots, StepBuffers

RECORD, PLAN_ROWS, PLAN_TOKENS = (PLAN.index(n) for n in ("record", "num_rows", "num_tokens"))
STEP_ROWS, STEP_TOKENS = (StepFields._fields.index(name) for name in ("num_rows", "num_tokens"))
HEAD_ROWS = HeadFields._fields.index("num_rows")
SAMPLE_ROWS, THRESHOLDS, OUT = (
    SampleFields._fields.index(name) for name in ("num_rows", "thresholds", "out")
)


class DecodeStep:
    """Application of a plan, layers, output layer and sampling, of rows without logits processing.

    Computes what the model runner does in separate calls.
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
        slots: Slots,
        buffers: StepBuffers,
    ) -> None:
        """Allocate memory for steps of all slots; the tensors keep their addresses."""
        self._layers, self._step = layers, step
        self._halves = range(2 * num_layers)
        num_rows, hidden = len(slots.seeds), embedding.shape[1]
        self._shape = BatchShape(num_rows, num_rows, num_rows, 0, SMALL_TILE, 1, 0)
        self._rope, self._kv_caches, self._buffers = rope, kv_caches, buffers
        self._residual = torch.empty(num_rows, hidden)
        self.logits = torch.empty(num_rows, len(head))  # of the last step's rows
        self._head = self._residual, norm, torch.tensor(eps, dtype=torch.float32), head
        self._embedding = embedding
        by_slot = slots.sampling()
        self._restrictions = Restrictions.of(by_slot)
        self._parameters: list[bytes] = []  # of all slots in the last step
        self._unrestricted = np.full(num_rows, -np.inf, np.float32)
        self._views = self.logits.numpy(), buffers.slots.numpy()
        block_size = kv_caches[0].k.shape[1]
        self._plan = step.plan_fields(0, slots, buffers, self._shape, block_size)
        self._sample = np.array(
            sample_fields(self.logits, buffers.slots, buffers.next_positions, by_slot), np.int64
        )
        self._version = -1

    def _prepare(self) -> None:
        """Prepare the arguments that point to the layers' memory."""
        layers, residual = self._layers, self._residual.data_ptr()
        batch = self._buffers.forward_batch(self._shape)
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
        """Run a step that the record describes; return the rows' tokens as `sample` does."""
        layers, step = self._layers, self._step
        if layers.version != self._version:
            self._prepare()
        plan, decoder, head, sample = self._addresses
        self._plan[RECORD] = record.ctypes.data
        self._plan[PLAN_ROWS] = self._plan[PLAN_TOKENS] = num_rows
        step.call_apply_plan(plan)
        layers.call_embed(self._embed, num_rows)
        self._fields[STEP_ROWS] = self._fields[STEP_TOKENS] = num_rows
        layers.call_decoder(decoder, self._halves, num_rows)
        self._head_fields[HEAD_ROWS] = num_rows
        layers.call_head(head, self.logits.shape[1], num_rows)
        tokens, lowest = np.zeros(num_rows, np.int64), self._thresholds(num_rows)
        self._sample[SAMPLE_ROWS] = num_rows
        self._sample[THRESHOLDS], self._sample[OUT] = lowest.ctypes.data, tokens.ctypes.data
        step.call_sample(sample)
        token_ids: list[int] = tokens.tolist()
        return token_ids

    def _thresholds(self, num_rows: int) -> Floats:
        """Return the lowest score that each row keeps; most steps find equal parameters."""
        parameters = [array.tobytes() for array in self._restrictions]
        if parameters != self._parameters:
            self._parameters = parameters
            self._is_restricted = self._restrictions.by_slot().any()
        if not self._is_restricted:
            return self._unrestricted
        logits, slots = self._views
        return self._restrictions.thresholds(logits[:num_rows], slots[:num_rows])
