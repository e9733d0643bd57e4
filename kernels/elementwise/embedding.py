"""Rows of a table, by index."""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.checks import check_contiguous, check_tensor


def embedding(input_ids: Tensor, weight: Tensor) -> Tensor:
    """weight[input_ids], [num_tokens, size].

    input_ids int64 [num_tokens], each a row of weight [num_rows, size].
    """
    check_tensor("input_ids", input_ids, (-1,), torch.int64)
    check_tensor("weight", weight, (-1, -1))
    if not weight.is_cuda:
        return functional.embedding(input_ids, weight)
    from penstock.kernels.elementwise.triton_embedding import embedding as on_gpu

    check_contiguous("weight", weight)
    return on_gpu(input_ids, weight)
