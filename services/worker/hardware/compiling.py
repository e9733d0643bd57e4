"""Compiled functions of a CPU, where this machine and the model allow them."""

import contextlib
import logging

import torch
from torch import Tensor

from penstock.kernels.cpu.compiled_step import compiled_step
from penstock.models.allocation import dequantize
from penstock.models.qwen3 import Qwen3
from penstock.protocol.checkpoint import ModelConfig, ModelError
from penstock.protocol.config import Config

log = logging.getLogger(__name__)
# `--quantization` → bits of weights that only compiled layers have
INTEGER_BITS = {"int8": 8, "int4": 4}


def may_compile(config: Config) -> bool:
    """Return whether layers on a CPU are compiled, where that is possible."""
    return config.attention == "auto" and config.kv_cache_dtype != "fp8"


def check_integers(config: Config, device: torch.device) -> None:
    """Raise ModelError for weights of integers where layers are not compiled."""
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
    """Return whether compiled layers will multiply weights of integers as a checkpoint has them.

    `--dtype float32` dequantizes them.
    """
    if config.dtype == "float32" or not may_compile(config):
        return False
    with contextlib.suppress(ImportError, OSError):
        from penstock.models.compiled import can_compile  # llvmlite

        return can_compile(model_config, tp_size)
    return False


def narrow_weights(model: Qwen3) -> None:
    """Give weights the type that compiled layers take."""
    with contextlib.suppress(ImportError, OSError):
        from penstock.models.compiled import narrow  # llvmlite

        narrow(model)


def compile_layers(config: Config, model_config: ModelConfig, model: Qwen3) -> None:
    """Use compiled code if this machine and the model allow it, and layers of it if wanted."""
    compiled_step()
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
        if bits:
            raise ModelError(f"--quantization {config.quantization}: {error}") from error
        log.warning("layers run in torch, not compiled: %s", error)
        dequantize(model)
