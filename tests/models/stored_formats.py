"""Quantized weights as their tools write and read them, in other ways than the code under test.

The readers are the definitions to which loaded weights must be equal in every bit. Their sources:
AutoAWQ 0.2.9 `awq/utils/packing_utils.py` (`dequantize_gemm`), AutoGPTQ 0.7.1
`qlinear_cuda_old.py` and GPTQModel 7.7.0 `qlinear/__init__.py` (`dequantize_weight`), and
compressed-tensors itself.
"""

import re
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.kernels.elementwise import quantize_blocks
from penstock.models.weights import SCALES, SINGLE_FILE
from penstock.protocol.quantization import FP8_BLOCKS
from tests.models.checkpoints import change_config

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""column of each nibble, the lowest first"""
Stored = dict[str, Tensor]
"""tensors by the end of their names, such as `.qweight`"""


def affine(
    weight: Tensor, bits: int, group_size: int, symmetric: bool, groups: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Round a weight [out, in]: codes [out, in], scales and zero points [out, groups], int32.

    groups: of each column, by default adjacent columns.
    """
    most = (1 << bits) - 1
    size = group_size if group_size > 0 else weight.shape[1]
    groups = torch.arange(weight.shape[1]) // size if groups is None else groups
    number = int(groups.max()) + 1
    scales, zeros = torch.empty(len(weight), number), torch.empty(len(weight), number)
    for group in range(number):
        part = weight[:, groups == group].float()
        if symmetric:
            scales[:, group] = part.abs().amax(1) / (most // 2)
            zeros[:, group] = (most + 1) // 2
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales[:, group] = (high - low) / most
            zeros[:, group] = (-low / scales[:, group]).round().clamp(0, most)
    scales = scales.half()
    codes = (weight.float() / scales.float()[:, groups]).round() + zeros[:, groups]
    return codes.clamp(0, most).int(), scales, zeros.int()


def write_awq(weight: Tensor, group_size: int) -> Stored:
    """Return the tensors of AutoAWQ's `gemm` version."""
    codes, scales, zeros = affine(weight, 4, group_size, symmetric=False)

    def packed(numbers: Tensor) -> Tensor:
        words = torch.zeros(len(numbers), numbers.shape[1] // 8, dtype=torch.int64)
        for nibble, column in enumerate(AWQ_COLUMNS):
            words |= numbers[:, column::8].long() << 4 * nibble
        return words.int()

    return {
        ".qweight": packed(codes.t()),
        ".qzeros": packed(zeros.t()),
        ".scales": scales.t().contiguous(),
    }


def read_awq(stored: Stored, group_size: int) -> Tensor:
    """Return the float16 weight [out, in]."""
    qweight, qzeros, scales = stored[".qweight"], stored[".qzeros"], stored[".scales"]
    dense = torch.empty(scales.shape[1], len(qweight), dtype=torch.float16)
    for nibble, column in enumerate(AWQ_COLUMNS):
        codes = (qweight >> 4 * nibble) & 15
        zeros = ((qzeros >> 4 * nibble) & 15).repeat_interleave(group_size, 0)
        by_row = scales[:, column::8].repeat_interleave(group_size, 0)
        dense[column::8] = ((codes - zeros) * by_row).t()
    return dense


def write_gptq(
    weight: Tensor, bits: int, group_size: int, *, sym: bool, act_order: bool, version: int
) -> Stored:
    """Return the tensors of GPTQ; act_order: columns are in groups by chance."""
    columns = weight.shape[1]
    size = group_size if group_size > 0 else columns
    groups = torch.arange(columns) // size
    if act_order:
        groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(1))]
    codes, scales, zeros = affine(weight, bits, group_size, sym, groups)
    if version == 1:
        zeros = zeros - 1 & (1 << bits) - 1

    def packed(numbers: Tensor) -> Tensor:
        """Pack the first dimension."""
        words = torch.zeros(-(-len(numbers) * bits // 32), numbers.shape[1], dtype=torch.int64)
        for row, part in enumerate(numbers.long()):
            words[row * bits // 32] |= part << row * bits % 32
        return words.int()

    return {
        ".qweight": packed(codes.t()),
        ".qzeros": packed(zeros).t().contiguous(),
        ".scales": scales.t().contiguous(),
        ".g_idx": groups.int(),
    }


def read_gptq(stored: Stored, bits: int, version: int) -> Tensor:
    """Return the float16 weight [out, in]."""
    scales, groups = stored[".scales"], stored[".g_idx"]
    mask, per_word = (1 << bits) - 1, 32 // bits
    shifts = torch.arange(0, 32, bits)
    zeros = (stored[".qzeros"][..., None] >> shifts).flatten(1) + (2 - version) & mask
    codes = torch.stack(
        [
            stored[".qweight"][k // per_word] >> k % per_word * bits & mask
            for k in range(len(groups))
        ]
    )
    return (scales[groups] * (codes - zeros[groups])).t()


def scheme_of(quantization: dict[str, Any]) -> QuantizationScheme:
    """Return the only scheme of a `quantization_config` of compressed-tensors."""
    (group,) = quantization["config_groups"].values()
    weights = QuantizationArgs(**group["weights"])
    return QuantizationScheme(targets=group["targets"], weights=weights)


def write_compressed(weight: Tensor, quantization: dict[str, Any], dtype: torch.dtype) -> Stored:
    """Return the tensors that compressed-tensors writes; dtype: of the scales."""
    scheme = scheme_of(quantization)
    args = scheme.weights
    assert args is not None
    if args.type == "float":
        scale, zeros = _float_scales(weight, str(args.strategy)).to(dtype), None
    else:
        group_size = args.group_size or -1
        _, scale, unsigned = affine(weight, args.num_bits, group_size, args.symmetric)
        scale = scale.to(dtype)
        zeros = (unsigned - (1 << args.num_bits - 1)).to(torch.int8)
    state = {"weight": weight.to(dtype), "weight_scale": scale}
    if zeros is not None and not args.symmetric:
        state["weight_zero_point"] = zeros
    compressor = BaseCompressor.get_value_from_registry(quantization["format"])
    return {f".{name}": one for name, one in compressor.compress(state, scheme).items()}


def read_compressed(stored: Stored, quantization: dict[str, Any]) -> Tensor:
    """Return the weight [out, in] as compressed-tensors dequantizes it."""
    compressor = BaseCompressor.get_value_from_registry(quantization["format"])
    state = {name[1:]: tensor for name, tensor in stored.items()}
    dense: Tensor = compressor.decompress(state, scheme_of(quantization))["weight"]
    return dense


def _float_scales(weight: Tensor, strategy: str) -> Tensor:
    if strategy == "tensor":
        return weight.abs().max().reshape(1) / 448
    if strategy == "channel":
        return weight.abs().amax(1, keepdim=True) / 448
    rows, columns = (size // 128 for size in weight.shape)
    return weight.view(rows, 128, columns, 128).abs().amax((1, 3)) / 448


def write(weight: Tensor, quantization: dict[str, Any]) -> tuple[Stored, Tensor]:
    """Return a weight's tensors by `quantization_config`, and what they stand for."""
    method = quantization["quant_method"]
    if method == "awq":
        stored = write_awq(weight, quantization["group_size"])
        return stored, read_awq(stored, quantization["group_size"])
    if method == "gptq":
        bits, version = quantization["bits"], 1 + (quantization["checkpoint_format"] == "gptq_v2")
        stored = write_gptq(
            weight,
            bits,
            quantization["group_size"],
            sym=quantization["sym"],
            act_order=quantization["desc_act"],
            version=version,
        )
        return stored, read_gptq(stored, bits, version)
    is_float = scheme_of(quantization).weights.type == "float"  # type: ignore[union-attr]
    stored = write_compressed(weight, quantization, torch.float32 if is_float else torch.bfloat16)
    return stored, read_compressed(stored, quantization)


def integers(
    num_bits: int, group_size: int, *, symmetric: bool = True, form: str = "pack-quantized"
) -> dict[str, Any]:
    """Return the `quantization_config` of compressed-tensors; group_size: 0 for whole rows."""
    weights: dict[str, Any] = {"num_bits": num_bits, "type": "int", "symmetric": symmetric}
    weights |= {"strategy": "group", "group_size": group_size} if group_size else {}
    return compressed(form, {"strategy": "channel", **weights})


def floats(strategy: str) -> dict[str, Any]:
    """Return the `quantization_config` of e4m3 in compressed-tensors."""
    blocks = {"block_structure": [128, 128]} if strategy == "block" else {}
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **blocks}
    return compressed("float-quantized", weights)


def compressed(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    """Return a `quantization_config` of compressed-tensors."""
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}
        },
    }


def awq(group_size: int = 128, **more: Any) -> dict[str, Any]:
    """Return the `quantization_config` of AutoAWQ."""
    fields = {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm"}
    return fields | {"zero_point": True, "modules_to_not_convert": None} | more


def gptq(bits: int = 4, group_size: int = 128, **more: Any) -> dict[str, Any]:
    """Return the `quantization_config` of GPTQModel."""
    fields = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "lm_head": False}
    return fields | {"checkpoint_format": "gptq", "desc_act": False, "sym": True} | more


def quantize_checkpoint(
    folder: Path, quantization: dict[str, Any], keep: str = "$^"
) -> dict[str, Tensor]:
    """Rewrite a checkpoint in a format and return the numbers that its products stand for.

    keep: regular expression of weights that stay in 16 bits. The head is quantized with `lm_head`.
    """
    tensors, dense = load_file(folder / SINGLE_FILE), {}
    wanted = r"_proj\.weight|lm_head" if quantization.get("lm_head") else r"_proj\.weight"
    chosen = [name for name in tensors if re.search(wanted, name) and not re.search(keep, name)]
    for name in chosen:
        stored, dense[name] = write(tensors.pop(name), quantization)
        module = name.removesuffix(".weight")
        tensors |= {module + end: one.contiguous() for end, one in stored.items()}
    save_file(tensors, folder / SINGLE_FILE)
    change_config(folder, quantization_config=quantization)
    return dense


def quantize_checkpoint_in_blocks(folder: Path) -> dict[str, Tensor]:
    """Rewrite a checkpoint in e4m3 with scales of blocks and return what its products stand for."""
    tensors, dense = load_file(folder / SINGLE_FILE), {}
    stored = re.compile(r"_proj(_qkvz?|_z)?\.weight$")
    for name in filter(stored.search, list(tensors)):
        blocks = quantize_blocks(tensors[name])
        tensors[name], tensors[name + SCALES] = blocks.values, blocks.scale
        dense[name] = blocks.dequantized()
    save_file(tensors, folder / SINGLE_FILE)
    change_config(folder, quantization_config=FP8_BLOCKS)
    return dense
