"""Check of `--deterministic`: that this GPU's products suit its kernels."""

import torch
from torch import Tensor

from penstock.kernels.determinism import is_deterministic
from penstock.kernels.linear.linear import linear, linear_add, norm_linear, norm_swiglu
from penstock.kernels.moe.moe import norm_moe
from penstock.kernels.quantize.types import Rows, parts
from penstock.models.moe import MoE
from penstock.models.parallel import ColumnParallelLinear, ParallelLMHead, RowParallelLinear
from penstock.models.qwen3 import Qwen3
from penstock.protocol.checkpoint import ModelError

ROWS = 1, 16, 17, 64, 65, 256
MANY_ROWS = 2048  # of weights other than the output layer's: as many as a long prompt has
EPS = 1e-6


@torch.inference_mode()
def checked(model: Qwen3) -> Qwen3:
    """Multiply each shape of weight with different numbers of rows. Raises ModelError.

    Few and many rows may use different instructions of the tensor cores, and another GPU
    may add in another order.
    """
    seen = set()
    if not is_deterministic():
        return model
    for name, module in model.named_modules():
        if not isinstance(module, ColumnParallelLinear | RowParallelLinear | ParallelLMHead | MoE):
            continue
        weight = module.gate_up_proj.weight if isinstance(module, MoE) else module.weight
        key = type(module), tuple(weight.shape), "gate_proj" in getattr(module, "outputs", ())
        if key in seen:
            continue
        seen.add(key)
        most = max(ROWS) if isinstance(module, ParallelLMHead) else MANY_ROWS
        x = torch.randn(most, weight.shape[-1], device=weight.device)
        x = (x * torch.randn_like(x).exp()).to(model.model.norm.weight.dtype)
        whole, _ = parts(_product(module, x))
        for rows in ROWS:
            some, _ = parts(_product(module, x[-rows:].contiguous()))
            if not torch.equal(some, whole[-rows:]):
                gpu = torch.cuda.get_device_name(weight.device)
                raise ModelError(
                    f"--deterministic: {name} has other bits with {rows} rows on {gpu}, expected "
                    "the same for any number; leave the option out, or serve 16-bit weights"
                )
    return model


def _product(
    module: ColumnParallelLinear | RowParallelLinear | ParallelLMHead | MoE, x: Tensor
) -> Rows:
    norm = torch.ones(x.shape[1], dtype=x.dtype, device=x.device)
    if isinstance(module, MoE):
        experts = module.gate_up_proj.weight, module.down_proj.weight
        return norm_moe(
            x, norm, EPS, module.gate.weight, *experts,
            top_k=module.top_k, normalize=module.normalize, first_expert=module.first,
        )  # fmt: skip
    if isinstance(module, ParallelLMHead):
        return norm_linear(x, norm, EPS, module.weight, torch.float32)
    if isinstance(module, RowParallelLinear):
        residual = x.new_ones(len(x), module.weight.shape[0])
        return (
            linear_add(x, module.weight, residual)
            if module.tp.size == 1
            else linear(x, module.weight)
        )
    if "gate_proj" in module.outputs:
        return norm_swiglu(x, norm, EPS, module.weight)
    return norm_linear(x, norm, EPS, module.weight)
