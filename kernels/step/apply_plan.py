"""Application of a plan: updates the persistent batch and makes the tensors of a step.

The host fills and copies one record of int32 for each step. Block tables, last tokens and sampling
parameters stay on the device, by slot. The record:

- header: number of rows, of appended blocks, of parameter sets; offsets of rows, appended blocks,
  parameter sets and prefill tokens;
- rows [num_rows, 9]: slot, first new position, number of new tokens, their first index in the step,
  their first index among the prefill tokens, the start of the row's context in `cu_seqlens_k`, the
  slot again if the row samples (otherwise -1), its state blocks (`pack_states`), the end of its
  prompt. For a row that decodes, the index among the prefill tokens is -1 for the token sampled
  last, or -2 - index;
- appended [num_appended, 3]: slot, column of its block table, block id;
- parameters [num_added, 1 + NUM_WORDS]: slot, and the slot's words in the slot table
  (`penstock.kernels.layouts.sampling.COLUMNS`);
- prefill token ids.
"""

from torch import Tensor, int32

from penstock.kernels.argument_checks import check_tensor
from penstock.kernels.back_ends import CHOSEN
from penstock.kernels.layouts.forward_batch import BatchShape
from penstock.kernels.layouts.step import Slots, StepBuffers
from penstock.kernels.step import reference


def apply_plan(
    record: Tensor, slots: Slots, buffers: StepBuffers, shape: BatchShape, block_size: int
) -> None:
    """Store the record's blocks and parameters in `slots`, and fill `buffers` up to `shape`.

    record: int32, as above. Rows, tokens and tiles beyond those of the record are padding.
    """
    check_tensor("record", record, (-1,), int32)
    for name, number, least, most in (
        ("rows", shape.num_rows, 1, buffers.slots.shape[0]),
        ("tokens", shape.num_tokens, 1, buffers.input_ids.shape[0]),
        ("tiles", shape.num_tiles, 0, buffers.tiles.shape[0]),
    ):
        if not least <= number <= most:
            raise ValueError(f"{name}: got {number}, expected {least} to {most}")
    if record.is_cuda:
        from penstock.kernels.step import triton_apply_plan

        triton_apply_plan.apply_plan(record, slots, buffers, shape, block_size)
        return
    if compiled := CHOSEN.compiled_step:
        compiled.apply_plan(record, slots, buffers, shape, block_size)
    else:
        reference.apply_changes(record, slots)
        reference.make_rows(record, slots, buffers, shape, block_size)
