"""GGUF files of random models, written by the gguf package from a checkpoint of transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quant_shape_to_byte_shape, quantize
from safetensors.torch import load_file, save_file
from torch import from_numpy

from penstock.launch.gguf import MATRICES, OTHERS, TOP
from penstock.models.weights import SINGLE_FILE

NORMAL, CONTROL, USER = 1, 3, 4


def write_gguf(folder: Path, path: Path, kind: str) -> dict[str, np.ndarray[Any, Any]]:
    """Write a dense checkpoint, or one of experts, with matrices of a type.

    Returns the numbers that the file stands for, by the names of its tensors.
    """
    config = json.loads((folder / "config.json").read_text())
    writer = new_writer(path, config)
    add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()))
    numbers = {}
    for name, data in named(load_file(folder / SINGLE_FILE), config).items():
        is_matrix = any(f".{part}." in name for part in MATRICES)
        numbers[name] = add_tensor(writer, name, data, kind if is_matrix else "F32")
    close(writer)
    return numbers


def new_writer(path: Path, config: dict[str, Any]) -> GGUFWriter:
    """Return a writer that has the fields of a configuration."""
    num_experts = config.get("num_experts", config.get("num_local_experts", 0))
    writer = GGUFWriter(path, "qwen3moe" if num_experts else "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    return writer


def add_tensor(
    writer: GGUFWriter, name: str, data: np.ndarray[Any, Any], kind: str
) -> np.ndarray[Any, Any]:
    """Return the numbers that the tensor has in this type."""
    type_ = GGMLQuantizationType[kind]
    stored = as_type(data, type_)
    writer.add_tensor(name, stored, raw_dtype=type_)
    return np.asarray(dequantize(stored, type_))


def close(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: GGUFWriter, tokenizer: dict[str, Any], template: str = "") -> None:
    added = {one["id"]: one["content"] for one in tokenizer["added_tokens"]}
    types = {one["id"]: CONTROL if one["special"] else USER for one in tokenizer["added_tokens"]}
    by_id = {number: token for token, number in tokenizer["model"]["vocab"].items()} | added
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([by_id[number] for number in range(len(by_id))])
    writer.add_token_types([types.get(number, NORMAL) for number in range(len(by_id))])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    writer.add_eos_token_id(max(added))
    if template:
        writer.add_chat_template(template)


def as_type(data: np.ndarray[Any, Any], kind: GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """Quantize; to types that the package can't write, as random blocks with small scales."""
    try:
        return np.asarray(quantize(data, kind))
    except NotImplementedError:
        shape = quant_shape_to_byte_shape(data.shape, kind)
        blocks = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        if kind == GGMLQuantizationType.Q4_K:  # blocks of 144 bytes begin with two scales
            scales = blocks.reshape(-1, 144)[:, :4].view(np.float16)
            scales[:] = np.random.default_rng(1).uniform(1e-4, 1e-3, scales.shape)
        else:  # Q6_K: blocks of 210 bytes end with one
            blocks.reshape(-1, 210)[:, 208:] = np.frombuffer(np.float16(1e-4).tobytes(), np.uint8)
        return blocks


def named(tensors: dict[str, Any], config: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Return a checkpoint's tensors under llama.cpp's names, experts in one."""
    result = {}
    for own, theirs in TOP.items():
        if f"{theirs}.weight" in tensors:
            result[f"{own}.weight"] = tensors[f"{theirs}.weight"].float().numpy()
    for layer in range(config["num_hidden_layers"]):
        for own, theirs in (MATRICES | OTHERS).items():
            name, at = f"blk.{layer}.{own}.weight", f"model.layers.{layer}.{theirs}.weight"
            if "{}" in at and at.format(0) in tensors:
                experts = [n for n in range(len(tensors)) if at.format(n) in tensors]
                result[name] = np.stack([tensors[at.format(n)].float().numpy() for n in experts])
            elif at in tensors:
                result[name] = tensors[at].float().numpy()
    return result


def save_numbers(numbers: dict[str, np.ndarray[Any, Any]], folder: Path) -> None:
    """Write the numbers of a GGUF file over the weights of the checkpoint it was made of.

    What has no matrix type is rounded to bfloat16, so that routers choose the same experts.
    """
    tensors = load_file(folder / SINGLE_FILE)
    for name, data in numbers.items():
        stem = name.removesuffix(".weight")
        if not stem.startswith("blk."):
            tensors[f"{TOP[stem]}.weight"] = from_numpy(data).bfloat16().float()
            continue
        _, layer, part = stem.split(".")
        if part in OTHERS:
            data = from_numpy(data).bfloat16().float().numpy()
        at = f"model.layers.{layer}.{(MATRICES | OTHERS)[part]}.weight"
        for expert, matrix in enumerate(data if "{}" in at else [data]):
            tensors[at.format(expert)] = from_numpy(np.ascontiguousarray(matrix))
    save_file(tensors, folder / SINGLE_FILE)
