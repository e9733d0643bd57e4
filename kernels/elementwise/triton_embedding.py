"""The embedding on a GPU: torch's takes 13 µs for 16 rows, this 2."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def embedding(input_ids: Tensor, weight: Tensor) -> Tensor:
    """As `penstock.kernels.elementwise.embedding.embedding`.

    Launched without programmatic dependent launch: what the step's plan kernels wrote is there for
    all kernels behind it, see `penstock.kernels.triton_pdl`.
    """
    num_tokens, size = input_ids.shape[0], weight.shape[1]
    out = weight.new_empty(num_tokens, size)
    _embedding_kernel[(num_tokens, triton.cdiv(size, BLOCK))](
        input_ids, weight, out, SIZE=size, BLOCK=BLOCK, num_warps=4
    )
    return out


@triton.jit(do_not_specialize_on_alignment=["ids_ptr"])
def _embedding_kernel(ids_ptr, weight_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + token)
    values = tl.load(weight_ptr + row * SIZE + columns, columns < SIZE)
    tl.store(out_ptr + token * SIZE + columns, values, columns < SIZE)
