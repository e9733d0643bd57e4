"""Checks of kernel arguments: on a GPU a wrong shape is a wild read, not an exception."""

import torch
from torch import Tensor


def check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Raises ValueError unless `tensor` has this shape (-1: any size) and one of these dtypes."""
    actual = tensor.shape
    right = len(actual) == len(shape)
    if right:
        # A plain loop: this runs some dozens of times for each layer of an eager step.
        for wanted, size in zip(shape, actual, strict=True):
            if wanted not in (-1, size):
                right = False
    if not right:
        raise ValueError(f"{name} has shape {list(actual)}; {_readable(shape)} is needed")
    if dtypes and tensor.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {tensor.dtype}; {_readable(dtypes)} is needed")


def check_contiguous(name: str, tensor: Tensor) -> None:
    """Raises ValueError unless `tensor` is contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {list(tensor.stride())}; it must be contiguous")


def _readable(values: tuple[object, ...]) -> str:
    return f"[{', '.join('any' if value == -1 else str(value) for value in values)}]"
