"""Launched steps, and copies to and from a device, for which the host does not wait."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.services.worker.step.step_output import BAD_LOGITS, NOTHING, PendingOutput, StepOutput
from penstock.services.worker.step.step_record import Integers

NO_ROWS: Integers = np.empty(0, np.int64)
NO_TOKENS = torch.empty(0, dtype=torch.int64)


class LaunchedStep:
    """A launched step, whose tokens are copied to the host."""

    def __init__(
        self, sampled: Integers, complete: Callable[[], tuple[Tensor, Any, PendingOutput]]
    ) -> None:
        """Keep the step; sampled: indices of the sampled rows, in ascending order of slot.

        complete: launches the rest of the step and returns tokens, int64 in host memory, complete
        after an event (a torch.cuda.Event, or None), and the other outputs.
        """
        self._sampled = sampled
        self._complete: Callable[[], tuple[Tensor, Any, PendingOutput]] | None = complete
        self._token_ids: list[int] | None = None

    @classmethod
    def finished(cls, token_ids: list[int]) -> "LaunchedStep":
        """Return a step that has run, without other outputs."""
        step = cls(NO_ROWS, lambda: (NO_TOKENS, None, NOTHING))
        step.complete()
        step._token_ids = token_ids
        return step

    def complete(self) -> None:
        """Launch the rest of the step; waits for earlier tokens if rows depend on these."""
        if self._complete:
            complete, self._complete = self._complete, None
            self._tokens, self._event, self._pending = complete()

    def done(self) -> bool:
        """Return True if `token_ids` returns without waiting."""
        return self._complete is None and (self._event is None or bool(self._event.query()))

    def token_ids(self) -> list[int]:
        """Wait for the sampled tokens; -1 for a failed row."""
        if self._token_ids is None:
            self.complete()
            if self._event is not None:
                self._event.synchronize()
            ids: list[int] = self._tokens.numpy()[self._sampled].tolist()
            self._token_ids = ids
        return self._token_ids

    def output(self) -> StepOutput:
        """Wait for the other outputs of the step."""
        missing = [index for index, token_id in enumerate(self.token_ids()) if token_id < 0]
        output = StepOutput([], [], [], []) if self._pending is NOTHING else self._pending.get()
        known = {index for index, _ in output.failed}
        output.failed.extend((index, BAD_LOGITS) for index in missing if index not in known)
        return output


def to_device(array: Any, device: torch.device) -> Tensor:
    """Return an array's copy on the device; on a CPU the array itself."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def integers_to_device(lists: Sequence[Any], device: torch.device) -> tuple[Tensor, ...]:
    """Return lists or arrays of integers as int64 tensors, in one copy.

    Each is aligned to 16 bytes, without which Triton would compile kernels again.
    """
    begins = list(accumulate((len(one) + len(one) % 2 for one in lists), initial=0))
    together = np.zeros(begins[-1], np.int64)
    places = [slice(begin, begin + len(one)) for begin, one in zip(begins, lists, strict=False)]
    for place, one in zip(places, lists, strict=True):
        together[place] = one
    on_device = to_device(together, device)
    return tuple(on_device[place] for place in places)


def to_host(tensor: Tensor) -> Tensor:
    """Return a tensor's copy in host memory, complete when the device has run so far."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
