"""Launched steps, whose outputs are copied to the host asynchronously."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.sampling.logits import top_logprobs
from penstock.protocol.messages.packed import PackedLogprobs
from penstock.services.worker.persistent_batch import Integers

# error message of a row without a token
BAD_LOGITS = (
    "the model's logits are NaN or infinite, or every token is forbidden; if no parameter "
    "forbids tokens, check the checkpoint, and --quantization, --kv-cache-dtype and "
    "--dtype (float16 ends at 65504)"
)

# (index among the sampled rows, float32 numbers or None if any is not finite)
PooledNumbers = Iterable[tuple[int, bytes | None]]
# returns the results of pooling rows, after the step has run
PendingNumbers = Callable[[], PooledNumbers]


class StepOutput(NamedTuple):
    """The outputs of a step in addition to token ids, as in `SampledTokens`."""

    logprobs: list[tuple[int, PackedLogprobs]]
    prompt_logprobs: list[tuple[int, list[PackedLogprobs]]]
    failed: list[tuple[int, str]]
    pooled: list[tuple[int, bytes]]
    drafts: bytes = b""
    seconds: float = 0.0


class PendingLogprobs(NamedTuple):
    """Packed logprobs in host memory, complete after the step has run."""

    rows: list[int]  # indices among the sampled rows
    numbers: list[int]  # requested number of likeliest tokens of each row
    packed: Tensor  # result of `pack_logprobs`


class PendingOutput(NamedTuple):
    """A `StepOutput` before the step has run."""

    logprobs: list[PendingLogprobs]
    prompt_logprobs: dict[int, list[Tensor]]  # slot → packed logprobs, in the order of the prompt
    failed: list[tuple[int, str]]
    pooled: list[PendingNumbers]

    def get(self) -> StepOutput:
        """Return the outputs of a step that has run."""
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


NOTHING = PendingOutput([], {}, [], [])  # for steps without the logits processor


def pack_logprobs(logits: Tensor, token_ids: Tensor, num_likeliest: int) -> Tensor:
    """Return `top_logprobs` as int32: token ids, bits of float32 logprobs, rank of the given token.

    Shape: [num_rows, 2 (1 + num_likeliest) + 1].
    """
    ids, logprobs, ranks = top_logprobs(logits, token_ids, num_likeliest)
    return torch.cat([ids.int(), logprobs.view(torch.int32), ranks[:, None].int()], 1)


def _unpack(row: Any, num_likeliest: int) -> PackedLogprobs:
    """Return the logprobs of the given token and of up to `num_likeliest` likeliest tokens."""
    token_ids, logprobs = np.split(row[:-1], 2)
    end = 1 + num_likeliest
    return PackedLogprobs(token_ids[:end].tobytes(), logprobs[:end].tobytes(), int(row[-1]))


NO_ROWS: Integers = np.empty(0, np.int64)
NO_TOKENS = torch.empty(0, dtype=torch.int64)


class Completed(NamedTuple):
    """The outputs of a step whose launch is complete, in host memory.

    Tokens and drafts are int64, and complete after the last event.
    """

    tokens: Tensor  # [num_rows]
    events: Any = None  # torch.cuda.Event of the beginning and of the end; None on a CPU
    pending: PendingOutput = NOTHING
    drafts: Tensor | None = None  # [num_rows, number of drafts]


class LaunchedStep:
    """A launched step, whose tokens are being copied to the host."""

    def __init__(self, sampled: Integers, complete: Callable[[], "Completed"]) -> None:
        """Keep the step.

        sampled: indices of the sampled rows, in ascending order of slot. complete: launches the
        rest of the step.
        """
        self._sampled = sampled
        self._complete: Callable[[], Completed] | None = complete
        self._token_ids: list[int] | None = None
        self.seconds = 0.0  # that this thread has computed the step, which on a CPU is all

    @classmethod
    def finished(cls, token_ids: list[int]) -> "LaunchedStep":
        """Return a step that has already run, with tokens only."""
        step = cls(NO_ROWS, lambda: Completed(NO_TOKENS))
        step.complete()
        step._token_ids = token_ids
        return step

    def complete(self) -> None:
        """Launch the rest of the step. Wait for the last step's tokens if rows depend on them."""
        if self._complete:
            complete, self._complete, begin = self._complete, None, monotonic()
            self._tokens, self._events, self._pending, self._drafts = complete()
            self.seconds += monotonic() - begin

    def done(self) -> bool:
        """Return whether `token_ids` returns without waiting."""
        return self._complete is None and (self._events is None or bool(self._events[1].query()))

    def token_ids(self) -> list[int]:
        """Wait for and return the sampled tokens; -1 for a failed row."""
        if self._token_ids is None:
            self.complete()
            if self._events is not None:
                self._events[1].synchronize()
            ids: list[int] = self._tokens.numpy()[self._sampled].tolist()
            self._token_ids = ids
        return self._token_ids

    def output(self) -> StepOutput:
        """Wait for and return the other outputs of the step."""
        missing = [index for index, token_id in enumerate(self.token_ids()) if token_id < 0]
        output = StepOutput([], [], [], []) if self._pending is NOTHING else self._pending.get()
        known = {index for index, _ in output.failed}
        output.failed.extend((index, BAD_LOGITS) for index in missing if index not in known)
        seconds, drafts = self.seconds, b""
        if self._events:
            begin, end = self._events
            seconds = begin.elapsed_time(end) / 1000
        if self._drafts is not None:
            drafts = self._drafts.numpy()[self._sampled].astype("<i4").tobytes()
        return output._replace(drafts=drafts, seconds=seconds)


def to_device(array: Any, device: torch.device) -> Tensor:
    """Return a copy of an array on the device; on a CPU, the array itself as a tensor."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def integers_to_device(lists: Sequence[Any], device: torch.device) -> tuple[Tensor, ...]:
    """Return lists or arrays of integers as int64 tensors on the device, with a single copy.

    Each tensor is aligned to 16 bytes. Otherwise Triton would compile kernels again.
    """
    begins = list(accumulate((len(part) + len(part) % 2 for part in lists), initial=0))
    together = np.zeros(begins[-1], np.int64)
    places = [slice(begin, begin + len(part)) for begin, part in zip(begins, lists, strict=False)]
    for place, part in zip(places, lists, strict=True):
        together[place] = part
    on_device = to_device(together, device)
    return tuple(on_device[place] for place in places)


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in host memory, complete after the device's work so far."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
