"""Checks of kernel arguments: on a GPU a wrong shape causes an invalid read, not an exception."""

from collections.abc import Iterable

import torch
from torch import Tensor


def check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    """Raise ValueError unless `tensor` has this shape (-1: any size) and one of these dtypes."""
    actual = tensor.shape
    matches = len(actual) == len(shape)
    if matches:
        # A plain loop: this runs dozens of times for each layer of an eager step.
        for expected, size in zip(shape, actual, strict=True):
            if expected not in (-1, size):
                matches = False
    if not matches:
        raise ValueError(f"{name}: got shape {list(actual)}, expected {_readable(shape)}")
    if dtypes and tensor.dtype not in dtypes:
        raise ValueError(f"{name}: got dtype {tensor.dtype}, expected {_readable(dtypes)}")


def check_contiguous(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless `tensor` is contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: got strides {list(tensor.stride())}, expected contiguous memory")


def check_blocks(names: Iterable[str], tensors: Iterable[Tensor], stride: int) -> None:
    """Raise ValueError unless the tensors' blocks are contiguous and `stride` elements apart."""
    for name, tensor in zip(names, tensors, strict=True):
        if (len(tensor) > 1 and tensor.stride(0) != stride) or not tensor[0].is_contiguous():
            raise ValueError(
                f"{name}: got strides {list(tensor.stride())}, expected contiguous blocks, "
                f"{stride} elements apart"
            )


def _readable(values: tuple[object, ...]) -> str:
    return f"[{', '.join('any' if value == -1 else str(value) for value in values)}]"
