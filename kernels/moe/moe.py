"""A mixture of experts in place of an MLP: each token goes through the few that a router chooses.

On a CPU a row does not depend on how many there are: `penstock.kernels.linear.linear` says why. All
tensors must be contiguous. Experts in 8 bits are multiplied as what they stand for.
"""

import torch
from torch import Tensor

from penstock.kernels.checks import check_contiguous, check_tensor
from penstock.kernels.elementwise.activation import silu_and_mul
from penstock.kernels.elementwise.norm import rms_norm
from penstock.kernels.linear.linear import linear
from penstock.kernels.quantize.quantize import FP8, Matrix, Quantized, parts, scale_shape


def norm_moe(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    router: Tensor,
    gate_up: Matrix,
    down: Matrix,
    *,
    top_k: int,
    normalize: bool,
    first_expert: int = 0,
    add: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """The experts' outputs for the norm of x [num_tokens, hidden_size], weighted and summed.

    A token's experts are the `top_k` of largest probability, their weights: the softmax of its
    products with `router` [num_experts, hidden_size]. An expert is a SwiGLU.

    gate_up: [experts here, 2 * size, hidden_size], gate's rows, then up's; down: [experts here,
    hidden_size, size]. They are the router's from `first_expert` on; others count as zero.
    normalize: a token's weights are made to sum up to 1. add: x is added. out: where it goes,
    contiguous.
    """
    _check(x, norm_weight, router, gate_up, down, out)
    last_expert = first_expert + len(down) - 1
    if not 1 <= top_k <= len(router):
        raise ValueError(f"top_k is {top_k}; 1 to {len(router)}, the number of experts, is needed")
    if not 0 <= first_expert <= last_expert < len(router):
        raise ValueError(
            f"experts {first_expert} to {last_expert} are here; there are {len(router)}"
        )
    normed = rms_norm(x, norm_weight, eps)
    if x.is_cuda:
        from penstock.kernels.moe.triton_moe import experts, router_logits

        logits = router_logits(normed, router)
        residual = x if add else None
        return experts(normed, logits, gate_up, down, top_k, normalize, first_expert, residual, out)
    chosen, weights = route(linear(normed, router), top_k, normalize)
    result = _experts_reference(normed, chosen - first_expert, weights, gate_up, down)
    result = x + result if add else result
    return result if out is None else out.copy_(result)


def _check(
    x: Tensor,
    norm_weight: Tensor,
    router: Tensor,
    gate_up: Matrix,
    down: Matrix,
    out: Tensor | None,
) -> None:
    check_tensor("x", x, (-1, -1))
    hidden_size, size = x.shape[1], down.shape[-1]
    check_tensor("norm_weight", norm_weight, (hidden_size,), x.dtype)
    check_tensor("router", router, (-1, hidden_size), x.dtype)
    check_contiguous("router", router)
    _check_experts("gate_up", gate_up, (len(down), 2 * size, hidden_size), x.dtype)
    _check_experts("down", down, (-1, hidden_size, size), x.dtype)
    if out is not None:
        check_tensor("out", out, x.shape, x.dtype)
        check_contiguous("out", out)


def _check_experts(name: str, weight: Matrix, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values, scale = parts(weight)
    check_tensor(name, values, shape, dtype if scale is None else FP8)
    check_contiguous(name, values)
    if isinstance(weight, Quantized) and scale is not None:
        check_tensor(f"{name}'s scale", scale, scale_shape(weight), torch.float32)
        check_contiguous(f"{name}'s scale", scale)


def route(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """A token's experts, int64 [num_tokens, top_k], and their weights, float32, largest first."""
    weights, experts = logits.float().softmax(-1).topk(top_k)
    return experts, weights / weights.sum(-1, keepdim=True) if normalize else weights


def _experts_reference(
    x: Tensor, experts: Tensor, weights: Tensor, gate_up: Matrix, down: Matrix
) -> Tensor:
    """experts: those that are not in [0, len(gate_up)) are elsewhere."""
    outputs = x.new_zeros(*experts.shape, x.shape[1])
    for expert in sorted(set(experts.flatten().tolist())):
        if 0 <= expert < len(gate_up):
            tokens, places = (experts == expert).nonzero(as_tuple=True)
            activated = silu_and_mul(linear(x[tokens], gate_up[expert]))
            outputs[tokens, places] = linear(activated, down[expert])
    total = x.new_zeros(x.shape)
    for place, weight in enumerate(weights.to(x.dtype).unbind(1)):  # one after the other, always
        total += weight[:, None] * outputs[:, place]
    return total
