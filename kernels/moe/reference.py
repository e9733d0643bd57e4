"""Routing and experts in torch.

On a CPU a row's bits do not depend on the number of rows: see `penstock.kernels.linear`.
"""

from torch import Tensor

from penstock.kernels.elementwise.elementwise import silu_and_mul
from penstock.kernels.linear.linear import linear
from penstock.kernels.quantize.types import Matrix


def route(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Return each token's experts, int64 [num_tokens, top_k], and weights, largest first."""
    weights, experts = logits.float().softmax(-1).topk(top_k)
    return experts, weights / weights.sum(-1, keepdim=True) if normalize else weights


def experts_outputs(
    x: Tensor, experts: Tensor, weights: Tensor, gate_up: Matrix, down: Matrix
) -> Tensor:
    """Sum the weighted outputs of the experts in [0, len(gate_up)); others are on other ranks."""
    outputs = x.new_zeros(*experts.shape, x.shape[1])
    for expert in sorted(set(experts.flatten().tolist())):
        if 0 <= expert < len(gate_up):
            tokens, places = (experts == expert).nonzero(as_tuple=True)
            activated = silu_and_mul(linear(x[tokens], gate_up[expert]))
            outputs[tokens, places] = linear(activated, down[expert])
    total = x.new_zeros(x.shape)
    for place, weight in enumerate(weights.to(x.dtype).unbind(1)):  # always in this order
        total += weight[:, None] * outputs[:, place]
    return total
