"""Memory of layers' weights, in the type and layout of their format and device.

Weights are built on torch's default device, in its default dtype, for inference only.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from penstock.kernels.matrices import BLOCK, FP8, Quantized
from penstock.kernels.packed.matrices import BLOCK as PACKED_BLOCK
from penstock.kernels.packed.matrices import Integers, Packed, fitting_group, num_groups
from penstock.protocol.quantization import WeightFormat

_takes_integers: ContextVar[bool] = ContextVar("takes_integers", default=False)
_has_memory: ContextVar[bool] = ContextVar("has_memory", default=True)


def add_weight(layer: Any, *shape: int, weight_format: WeightFormat | None) -> None:
    """Make a layer's `weight`, [..., out_features, in_features], in 16 bits without a format.

    On a CPU, a weight of integers is in 16 bits unless compiled layers take it.
    """
    if weight_format is None:
        layer.weight = parameter(*shape)
    elif weight_format.is_fp8:
        _add_fp8_weight(layer, *shape, in_blocks=weight_format.scales == "blocks")
    elif stays_packed():
        _add_packed_weight(layer, *shape, weight_format=weight_format)
    elif group := cpu_group(shape, weight_format):
        _add_integers(layer, *shape, bits=weight_format.bits, group_size=group)
    else:
        layer.weight = parameter(*shape)


def stays_packed() -> bool:
    """Return True if the products of torch's default device take packed integers."""
    return torch.get_default_device().type != "cpu"


@contextmanager
def with_integers() -> Iterator[None]:
    """Make weights of integers on a CPU for products of compiled layers, where they fit."""
    token = _takes_integers.set(True)
    try:
        yield
    finally:
        _takes_integers.reset(token)


def cpu_group(shape: Sequence[int], weight_format: WeightFormat) -> int:
    """Return the columns of a group in `Integers`, or 0 for a weight that can't be one."""
    if not _takes_integers.get() or len(shape) > 2 or weight_format.act_order:
        return 0
    return fitting_group(shape[1], weight_format.group_size or shape[1])


def _add_integers(layer: Any, rows: int, columns: int, *, bits: int, group_size: int) -> None:
    codes = torch.int8 if bits == 8 else torch.uint8
    layer.codes = parameter(rows, columns * bits // 8, dtype=codes)
    layer.scale = parameter(rows, columns // group_size, 2, dtype=torch.float32)
    layer.weight = Integers(layer.codes, layer.scale)


def dequantize(model: nn.Module) -> None:
    """Replace `Integers`, which only compiled layers multiply, by their numbers."""
    for layer in model.modules():
        weight: Any = getattr(layer, "weight", None)
        if isinstance(weight, Integers):
            del layer.codes, layer.scale, layer.weight
            layer.weight = nn.Parameter(weight.dequantized(), requires_grad=False)


def _add_fp8_weight(layer: Any, *shape: int, in_blocks: bool) -> None:
    *others, rows, columns = shape
    blocks = -(-rows // BLOCK), -(-columns // BLOCK)
    layer.values = parameter(*shape, dtype=FP8)
    layer.scale = parameter(*others, *(blocks if in_blocks else (rows,)), dtype=torch.float32)
    layer.weight = Quantized(layer.values, layer.scale)


def _add_packed_weight(layer: Any, *shape: int, weight_format: WeightFormat) -> None:
    *others, rows, columns = shape
    group_size = weight_format.group_size or columns
    blocks, groups = num_groups(columns, PACKED_BLOCK), num_groups(columns, group_size)
    words = *others, blocks, rows, 4 * weight_format.bits
    layer.words = parameter(*words, dtype=torch.int32)
    layer.groups = parameter(*others, groups, rows, dtype=torch.int32)
    order = None
    if weight_format.act_order:
        order = layer.order = parameter(*others, columns, dtype=torch.int32)
    layer.weight = Packed(layer.words, layer.groups, order, columns, group_size)


@contextmanager
def without_memory() -> Iterator[None]:
    """Make parameters that have no memory yet, only a type and a shape."""
    token = _has_memory.set(False)
    try:
        yield
    finally:
        _has_memory.reset(token)


def parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Return a parameter to be loaded."""
    if _has_memory.get():
        return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
    return nn.Parameter(torch.zeros((), dtype=dtype).expand(shape), requires_grad=False)
