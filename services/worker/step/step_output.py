"""Outputs of a step in addition to token ids: logprobs, failures, pooled numbers."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.sampling.logits import top_logprobs
from penstock.protocol.messages.logprobs import PackedLogprobs

# failure of a row without a token
BAD_LOGITS = (
    "the model's logits are NaN or infinite, or every token is forbidden; if no parameter "
    "forbids tokens, check the checkpoint, and --quantization, --kv-cache-dtype and "
    "--dtype (float16 ends at 65504)"
)

# (index among the sampled rows; float32 numbers, or None where they are not finite)
PooledNumbers = Iterable[tuple[int, bytes | None]]
# returns the results of rows with `pooling` when the step has run
PendingNumbers = Callable[[], PooledNumbers]


class StepOutput(NamedTuple):
    """Outputs of a step in addition to token ids, as in `SampledTokens`."""

    logprobs: list[tuple[int, PackedLogprobs]]
    prompt_logprobs: list[tuple[int, list[PackedLogprobs]]]
    failed: list[tuple[int, str]]
    pooled: list[tuple[int, bytes]]


class PendingLogprobs(NamedTuple):
    """Packed logprobs in host memory, which are complete when the step has run."""

    rows: list[int]  # indices among the sampled rows
    numbers: list[int]  # requested likeliest tokens of each row
    packed: Tensor  # as `pack_logprobs` returns them


class PendingOutput(NamedTuple):
    """A `StepOutput` before the step has run."""

    logprobs: list[PendingLogprobs]
    prompt_logprobs: dict[int, list[Tensor]]  # slot → packed, in the order of the prompt
    failed: list[tuple[int, str]]
    pooled: list[PendingNumbers]

    def get(self) -> StepOutput:
        """Return the outputs; the step must have run."""
        logprobs = [
            (index, _unpack(row, number))
            for pending in self.logprobs
            for index, number, row in zip(
                pending.rows, pending.numbers, pending.packed.numpy(), strict=True
            )
        ]
        prompt_logprobs = [
            (slot, [_unpack(row, row.size) for part in parts for row in part.numpy()])
            for slot, parts in self.prompt_logprobs.items()
        ]
        pooled = [pair for numbers in self.pooled for pair in numbers()]
        failed = [(index, BAD_LOGITS) for index, numbers in pooled if numbers is None]
        finite = [(index, numbers) for index, numbers in pooled if numbers is not None]
        return StepOutput(logprobs, prompt_logprobs, self.failed + failed, finite)


NOTHING = PendingOutput([], {}, [], [])  # of a step whose rows need no logits processor


def pack_logprobs(logits: Tensor, token_ids: Tensor, num_likeliest: int) -> Tensor:
    """Return `top_logprobs` as int32: ids, bits of floats, the rank of the given token.

    Shape: [num_rows, 2 (1 + num_likeliest) + 1].
    """
    ids, logprobs, ranks = top_logprobs(logits, token_ids, num_likeliest)
    return torch.cat([ids.int(), logprobs.view(torch.int32), ranks[:, None].int()], 1)


def _unpack(row: Any, num_likeliest: int) -> PackedLogprobs:
    """Return the given token and up to `num_likeliest` likeliest tokens."""
    token_ids, logprobs = np.split(row[:-1], 2)
    end = 1 + num_likeliest
    return PackedLogprobs(token_ids[:end].tobytes(), logprobs[:end].tobytes(), int(row[-1]))
