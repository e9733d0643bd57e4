"""What a step tells beside its tokens, and how it comes to the host."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.sampling.penalties import top_logprobs
from penstock.protocol.messages.logprobs import PackedLogprobs
from penstock.services.worker.persistent_batch import Record

BAD_LOGITS = (
    "the model's logits are NaN or infinite, or every token is forbidden; where no parameter "
    "forbids tokens, check the checkpoint, and --quantization and --kv-cache-dtype"
)
"""why a row has no token"""


class Told(NamedTuple):
    """As in `SampledTokens`."""

    logprobs: list[tuple[int, PackedLogprobs]]
    prompt_logprobs: list[tuple[int, list[PackedLogprobs]]]
    failed: list[tuple[int, str]]


class OnItsWay(NamedTuple):
    """Tensors in host memory, filled when the step has run."""

    logprobs: list[tuple[list[int], list[int], Tensor]]
    """(which of the sampled rows, how many likeliest tokens for each, packed)"""
    prompt_logprobs: dict[int, list[Tensor]]
    """slot → packed, in the order of the prompt"""
    failed: list[tuple[int, str]]

    def told(self) -> Told:
        """To be called when the step has run."""
        logprobs = [
            (index, _unpack_row(row, num_likeliest))
            for which, numbers, packed in self.logprobs
            for index, num_likeliest, row in zip(which, numbers, packed.numpy(), strict=True)
        ]
        prompt_logprobs = [
            (slot, [_unpack_row(row, row.size) for part in parts for row in part.numpy()])
            for slot, parts in self.prompt_logprobs.items()
        ]
        return Told(logprobs, prompt_logprobs, self.failed)


def pack_logprobs(logits: Tensor, token_ids: Tensor, num_likeliest: int) -> Tensor:
    """Return `top_logprobs` as int32 [num_rows, 2 (1 + num_likeliest)]: ids, bits of floats."""
    told, logprobs = top_logprobs(logits, token_ids, num_likeliest)
    return torch.cat([told.int(), logprobs.view(torch.int32)], 1)


def _unpack_row(row: Record, num_likeliest: int) -> PackedLogprobs:
    """The token and at most so many likeliest ones."""
    token_ids, logprobs = np.split(row, 2)
    end = 1 + num_likeliest
    return PackedLogprobs(token_ids[:end].tobytes(), logprobs[:end].tobytes())
