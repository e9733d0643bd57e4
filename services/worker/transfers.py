"""Copies between host and device that the host does not wait for."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(array: Any, device: torch.device) -> Tensor:
    """An array's copy on the device; on a CPU the array itself."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def integers_to_device(lists: Sequence[Any], device: torch.device) -> tuple[Tensor, ...]:
    """List or arrays of integers as int64 tensors, in one copy."""
    together = np.concatenate([np.asarray(one, np.int64) for one in lists])
    return torch.split(to_device(together, device), [len(one) for one in lists])


def to_host(tensor: Tensor) -> Tensor:
    """A tensor's copy in host memory, there when the device has come so far."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
