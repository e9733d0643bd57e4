"""A mixture of experts in place of an MLP: a router chooses a few experts for each token.

All tensors must be contiguous. Experts in 8 bits are dequantized in the products. On a CPU a row's
bits do not depend on the number of rows: see `penstock.kernels.linear`.
"""

import torch
from torch import Tensor

from penstock.kernels.argument_checks import check_contiguous, check_tensor
from penstock.kernels.elementwise import rms_norm, silu_and_mul
from penstock.kernels.linear.linear import linear
from penstock.kernels.matrices import FP8, Matrix, Quantized, parts, scale_shape


def route(
    logits: Tensor, top_k: int, normalize: bool, shared: bool = False
) -> tuple[Tensor, Tensor]:
    """Return each token's experts, int64 [num_tokens, top_k], and weights, largest first.

    shared: the last expert, of all tokens, follows.
    """
    number = logits.shape[1] - shared
    logits = logits.float()
    weights, experts = logits[:, :number].softmax(-1).topk(top_k)
    gates = logits[:, number:]
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return (
        torch.cat([experts, torch.full_like(gates, number, dtype=torch.long)], 1),
        torch.cat([weights, 1 / (1 + torch.exp(-gates))], 1),
    )


def experts_outputs(
    x: Tensor, experts: Tensor, weights: Tensor, gate_up: Matrix, down: Matrix
) -> Tensor:
    """Sum the weighted outputs of the experts in [0, len(gate_up)); other ranks have the others."""
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
    shared: bool = False,
    add: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Sum the weighted outputs of the experts for the norm of x [num_tokens, hidden_size].

    A token's experts are the `top_k` experts of largest probability. Their weights are the softmax
    of the token's products with `router` [num_experts, hidden_size]. An expert is a SwiGLU.

    gate_up: [local experts, 2 * size, hidden_size], the rows of gate, then of up. down: [local
    experts, hidden_size, size]. The local experts start at `first_expert`; other experts count as
    zero. normalize: scales a token's weights to sum 1. shared: all tokens have the last expert as
    well, with the sigmoid of its product as weight; all experts are local then. add: adds x. out:
    contiguous memory of the result.
    """
    _check(x, norm_weight, router, gate_up, down, out)
    last_expert, most = first_expert + len(down) - 1, len(router) - shared
    if not 1 <= top_k <= most:
        raise ValueError(f"top_k: got {top_k}, expected 1 to {most}, the number of experts")
    if not 0 <= first_expert <= last_expert < len(router):
        raise ValueError(
            f"first_expert: got experts {first_expert} to {last_expert}, "
            f"expected 0 to {len(router) - 1}"
        )
    if x.is_cuda:
        from penstock.kernels.triton_moe import experts, norm_and_logits

        normed, logits = norm_and_logits(x, norm_weight, eps, router)
        residual = x if add else None
        routed = top_k, normalize, first_expert, shared
        return experts(normed, logits, gate_up, down, *routed, residual=residual, out=out)
    normed = rms_norm(x, norm_weight, eps)
    chosen, weights = route(linear(normed, router), top_k, normalize, shared)
    result = experts_outputs(normed, chosen - first_expert, weights, gate_up, down)
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
    check_tensor("norm_weight", norm_weight, (hidden_size,), x.dtype, torch.float32)
    check_tensor("router", router, (-1, hidden_size), x.dtype)
    check_contiguous("router", router)
    _check_experts("gate_up", gate_up, (len(down), 2 * size, hidden_size), x.dtype)
    _check_experts("down", down, (-1, hidden_size, size), x.dtype)
    if out is not None:
        check_tensor("out", out, x.shape, x.dtype)
        check_contiguous("out", out)


def _check_experts(name: str, weight: Matrix, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not isinstance(weight, Tensor | Quantized):
        weight.check(name, shape)
        return
    values, scale = parts(weight)
    check_tensor(name, values, shape, dtype if scale is None else FP8)
    check_contiguous(name, values)
    if isinstance(weight, Quantized) and scale is not None:
        check_tensor(f"{name}'s scale", scale, scale_shape(weight), torch.float32)
        check_contiguous(f"{name}'s scale", scale)
