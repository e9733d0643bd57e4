"""Checks of the weights of compiled layers."""

import torch
from torch import Tensor

from penstock.kernels.argument_checks import check_contiguous, check_tensor
from penstock.kernels.cpu.llvm_products import Kind, integer_kind
from penstock.kernels.cpu.types import MATRICES, LayerShape, LayerWeights, Matrix
from penstock.kernels.packed.matrices import UNIT, Integers, fitting_group

# kinds of matrices by element type
KINDS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def elements(matrix: Matrix) -> Tensor:
    """Return the tensor of a matrix's elements."""
    return matrix.codes if isinstance(matrix, Integers) else matrix


def kind_of(matrix: Matrix) -> Kind:
    """Return the kind of a matrix."""
    return integer_kind(matrix) if isinstance(matrix, Integers) else KINDS[matrix.dtype]


def check_layer(layer: LayerWeights, shape: LayerShape) -> None:
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
        if name in MATRICES and matrix is not None:
            check_matrix(name, matrix, expected[name])
        elif matrix is not None:
            check_tensor(name, matrix, expected[name], torch.float32)
            check_contiguous(name, matrix)


def check_matrix(name: str, matrix: Matrix, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a weight has this shape, and elements of a known type."""
    if not isinstance(matrix, Integers):
        check_tensor(name, matrix, shape, *KINDS)
        check_contiguous(name, matrix)
        return
    codes, scale, columns = matrix.codes, matrix.scale, shape[-1]
    check_tensor(name, codes, (*shape[:-1], columns * matrix.bits // 8), torch.int8, torch.uint8)
    rest = (2,) if matrix.has_shift else ()
    check_tensor(f"{name}'s scale", scale, (len(codes), -1, *rest), torch.float32)
    groups = scale.shape[1]
    if columns % UNIT or fitting_group(columns, columns // groups) * groups != columns:
        raise ValueError(f"{name}'s scale: got {groups} groups of {columns} columns")
    check_contiguous(f"{name}'s scale", scale)
    check_contiguous(name, codes)
