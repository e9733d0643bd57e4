"""The device of a worker and its abilities: types, compiled layers, deterministic products."""

import contextlib
import logging
import os

import torch
from torch import Tensor, nn

from penstock.kernels.back_ends import is_deterministic
from penstock.kernels.extras import INSTALL, use_compiled_step
from penstock.kernels.linear.linear import linear, linear_add, norm_linear, norm_swiglu
from penstock.kernels.matrices import Rows, parts
from penstock.kernels.moe import norm_moe
from penstock.models.layers import MoE
from penstock.models.model import Model
from penstock.models.parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    dequantize,
)
from penstock.protocol.checkpoint import ModelConfig, ModelError
from penstock.protocol.config import Config
from penstock.protocol.transport.process import NODE_VARIABLE

log = logging.getLogger(__name__)
# Index of the worker's GPU. torch sees all GPUs of the node, because the ranks need peer access.
GPU_VARIABLE = "PENSTOCK_GPU"
OLDEST = 8, 0  # lowest compute capability with bfloat16 and asynchronous copies


def choose_device(wanted: str, index: int, tp_size: int, num_replicas: int = 1) -> torch.device:
    """Return the GPU of a worker, or the CPU.

    index: number of the worker among the workers of all replicas. On a cluster, GPU_VARIABLE has
    the index of the GPU. Raises ModelError if GPUs are requested and the machine has too few.
    """
    given = os.environ.get(GPU_VARIABLE)
    if given is not None or NODE_VARIABLE in os.environ:
        return _given_device(wanted, given)
    num_gpus = torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and not num_gpus):
        return torch.device("cpu")
    if num_gpus < tp_size * num_replicas:
        of_replicas = f" with --dp {num_replicas}" if num_replicas > 1 else ""
        too_few = (
            f"--tp {tp_size}{of_replicas} needs {tp_size * num_replicas} GPUs; "
            f"this machine has {num_gpus}"
        )
        if wanted == "cuda":
            raise ModelError(too_few)
        log.warning("%s: the model runs on the CPU", too_few)
        return torch.device("cpu")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _given_device(wanted: str, given: str | None) -> torch.device:
    """Return the given device. Do not fall back to the CPU, because other ranks may have GPUs."""
    if wanted == "cpu" or (wanted == "auto" and given is None):
        return torch.device("cpu")
    if given is None:
        raise ModelError(f"--device: got {wanted}, but the cluster assigned no GPU to this worker")
    num_gpus = torch.cuda.device_count()
    if int(given) >= num_gpus:
        raise ModelError(f"{GPU_VARIABLE}: got {given}, expected an index of {num_gpus} GPUs")
    torch.cuda.set_device(int(given))
    return torch.device("cuda", int(given))


def check_capability(device: torch.device) -> None:
    """Raise ModelError for a GPU that is too old."""
    if device.type == "cpu":
        return
    found = torch.cuda.get_device_properties(device)
    if (found.major, found.minor) < OLDEST:
        raise ModelError(
            f"--device: got {found.name} of compute capability {found.major}.{found.minor}, "
            "expected 8.0 or newer; --device cpu serves small models"
        )


def compute_dtype(model: ModelConfig, wanted: str, device: torch.device) -> torch.dtype:
    """Return the data type for `--dtype` on this device. Raises ModelError."""
    if device.type == "cpu":
        if wanted not in ("auto", "float32"):
            raise ModelError(f"--dtype: got {wanted} on a CPU, expected auto or float32")
        return torch.float32
    if wanted == "float32":
        raise ModelError("--dtype: got float32 on a GPU, expected auto, bfloat16 or float16")
    chosen = model.own_dtype if wanted == "auto" else wanted
    return torch.float16 if chosen == "float16" else torch.bfloat16


# `--quantization` → bits of weights, for formats that only compiled layers support
INTEGER_BITS = {"int8": 8, "int4": 4}


def may_compile(config: Config) -> bool:
    """Return whether the configuration allows compiled layers on a CPU."""
    return config.attention == "auto" and config.kv_cache_dtype != "fp8"


def check_integers(config: Config, device: torch.device) -> None:
    """Raise ModelError for integer weights without compiled layers."""
    if config.quantization not in INTEGER_BITS:
        return
    if device.type != "cpu":
        raise ModelError(f"--quantization: got {config.quantization} on a GPU, expected fp8")
    if not may_compile(config):
        raise ModelError(
            f"--quantization: got {config.quantization} with --attention {config.attention} "
            f"and --kv-cache-dtype {config.kv_cache_dtype}, expected auto for both"
        )


def takes_integers(config: Config, model_config: ModelConfig, tp_size: int) -> bool:
    """Return whether compiled layers will use a checkpoint's integer weights directly.

    `--dtype float32` dequantizes the weights.
    """
    if config.dtype == "float32" or not may_compile(config):
        return False
    with contextlib.suppress(ImportError, OSError):
        from penstock.models.compiled import can_compile  # llvmlite

        return can_compile(model_config, tp_size)
    return False


def narrow_weights(model: Model) -> None:
    """Convert weights to the type that compiled layers take."""
    with contextlib.suppress(ImportError, OSError):
        from penstock.models.compiled import narrow  # llvmlite

        narrow(model)


def compile_layers(config: Config, model_config: ModelConfig, model: Model) -> None:
    """Use compiled code for steps, and for layers if possible. Raises ModelError."""
    model.count_layers()
    use_compiled_step()
    bits = INTEGER_BITS.get(config.quantization)
    if not may_compile(config):
        return
    try:
        from penstock.models.compiled import CompiledDecoder  # llvmlite

        in_16_bits = isinstance(model.head.weight, Tensor)
        head = config.quantize_lm_head and model.has_head and in_16_bits
        model.compiled = CompiledDecoder(model, model_config, bits or 16, head)
        log.info("layers are compiled, attention too")
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        reason = f"{error}; {INSTALL}" if isinstance(error, ImportError) else str(error)
        if bits:
            raise ModelError(f"--quantization {config.quantization}: {reason}") from error
        log.warning("layers run in torch, not compiled: %s", reason)
        dequantize(model)


ROWS = 1, 16, 17, 64, 65, 256
MANY_ROWS = 2048  # rows of a long prompt, for all weights except the output layer's
EPS = 1e-6
Product = ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding | MoE


@torch.inference_mode()
def checked(model: Model) -> Model:
    """Return the model after a check of `--deterministic`. Raises ModelError.

    Each shape of weight is multiplied with different numbers of rows, and the bits are compared.
    Few and many rows may use different instructions of the tensor cores, and another GPU may add in
    another order.
    """
    seen = set()
    if not is_deterministic():
        return model
    for name, module in model.named_modules():
        if not isinstance(module, Product):
            continue
        weight = module.gate_up_proj.weight if isinstance(module, MoE) else module.weight
        # the output layer may have 8-bit weights where the embedding of its shape has not
        key = type(module), type(weight), tuple(weight.shape), _is_swiglu(module)
        if key in seen:
            continue
        seen.add(key)
        most = max(ROWS) if isinstance(module, VocabParallelEmbedding) else MANY_ROWS
        x = torch.randn(most, weight.shape[-1], device=weight.device)
        x = (x * torch.randn_like(x).exp()).to(model.model.embed_tokens.weight.dtype)
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


def _product(module: Product, x: Tensor) -> Rows:
    norm = torch.ones(x.shape[1], dtype=x.dtype, device=x.device)
    if isinstance(module, MoE):
        experts = module.gate_up_proj.weight, module.down_proj.weight
        return norm_moe(
            x, norm, EPS, module.gate.weight, *experts,
            top_k=module.top_k, normalize=module.normalize, first_expert=module.first,
            shared=module.has_shared,
        )  # fmt: skip
    if isinstance(module, VocabParallelEmbedding):
        return norm_linear(x, norm, EPS, module.weight, torch.float32)
    if isinstance(module, RowParallelLinear):
        residual = x.new_ones(len(x), module.weight.shape[0])
        return (
            linear_add(x, module.weight, residual)
            if module.tp.size == 1
            else linear(x, module.weight)
        )
    if _is_swiglu(module):
        return norm_swiglu(x, norm, EPS, module.weight)
    return norm_linear(x, norm, EPS, module.weight)


def _is_swiglu(module: nn.Module) -> bool:
    return isinstance(module, ColumnParallelLinear) and module.weights[0].module == "gate_proj"
