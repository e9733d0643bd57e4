"""Checks of the weights of compiled layers."""

import torch
from torch import Tensor

from penstock.kernels.argument_checks import check_contiguous, check_tensor
from penstock.kernels.cpu.integers import GROUP, Integers
from penstock.kernels.cpu.types import MATRICES, LayerShape, LayerWeights, Matrix


def elements(matrix: Matrix) -> Tensor:
    """Return the tensor of a matrix's elements."""
    return matrix.codes if isinstance(matrix, Integers) else matrix


def check_layer(layer: LayerWeights, shape: LayerShape, dtype: torch.dtype) -> None:
    """Raise ValueError unless the weights have these sizes."""
    inputs = shape.heads * shape.head_dim
    expected = {
        "input_norm": (shape.hidden,),
        "qkv": (shape.qkv, shape.hidden),
        "q_norm": (shape.head_dim,),
        "k_norm": (shape.head_dim,),
        "o": (shape.hidden, inputs),
        "post_norm": (shape.hidden,),
        "gate_up": (2 * shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
    }
    for name, matrix in layer._asdict().items():
        if matrix is not None:
            is_matrix = name in MATRICES
            check_matrix(name, matrix, expected[name], dtype if is_matrix else torch.float32)


def check_matrix(name: str, matrix: Matrix, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ValueError unless a weight has this shape, and elements of this type."""
    numbers = elements(matrix)
    if isinstance(matrix, Integers):
        *others, columns = shape
        check_tensor(name, numbers, (*others, columns * matrix.bits // 8), dtype)
        check_tensor(f"{name}'s scale", matrix.scale, (len(numbers), columns // GROUP))
        check_contiguous(f"{name}'s scale", matrix.scale)
    else:
        check_tensor(name, numbers, shape, dtype)
    check_contiguous(name, numbers)
