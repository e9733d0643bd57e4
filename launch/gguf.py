"""GGUF files of Qwen3 as checkpoints in Hugging Face's format.

Matrices of Q8_0 keep their integers and scales. Matrices of other quantized types are dequantized,
as the `gguf` package defines it, and rounded to 8 bits in groups of 32 columns. The largest error
is about 1/254 of a group's largest number. All other tensors become bfloat16. The file format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from tqdm import tqdm

from penstock.protocol.checkpoint import ARCHITECTURE, MOE_ARCHITECTURE, ModelError, read_bytes

MAGIC = b"GGUF"
GROUP = 32  # columns that share a scale
_PLAIN = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
# types of tokens: tokens of the byte-pair model, added special tokens, and added text tokens
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
MATRICES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
OTHERS = {
    "attn_norm": "input_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# regular expression that splits words, as in Qwen's `tokenizer.json`
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDS = ("<|im_end|>", "<|endoftext|>")

Tensors = dict[str, tuple[str, NDArray[Any]]]  # name → type as safetensors names it, and data


def convert(path: Path, folder: Path) -> None:
    """Write the checkpoint of a GGUF file into an empty folder. Raises ModelError."""
    reader, fields = _read(path)
    shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}
    config = _config(path, fields, shapes)
    write_tokenizer(path, fields, folder)
    index: dict[str, str] = {}
    plain: list[str] = []
    for number, shard in enumerate(tqdm(_shards(reader), desc="GGUF", unit="shard", disable=None)):
        tensors: Tensors = {}
        for tensor in shard:
            try:
                plain += _add(tensors, path, tensor)
            except (NotImplementedError, ValueError, LookupError) as error:
                found = f"{tensor.tensor_type.name} of shape {tensor.shape.tolist()}"
                expected = f"a type that the gguf package dequantizes, in rows of whole {GROUP}"
                text = f"{path}: {tensor.name}: got {found}, expected {expected}"
                raise ModelError(text) from error
        name = f"model-{number:05}.safetensors"
        _save(folder / name, tensors)
        index |= dict.fromkeys(tensors, name)
    _write(folder / "model.safetensors.index.json", {"weight_map": index})
    _write(folder / "config.json", config | {"quantization_config": _quantization(plain)})


def _read(path: Path) -> tuple[GGUFReader, dict[str, Any]]:
    """Return a GGUF file, and its fields by name. Raises ModelError."""
    if not read_bytes(path, 64).startswith(MAGIC):
        raise ModelError(f"{path} is not a GGUF file; download it again")
    try:
        reader = GGUFReader(path)
        return reader, {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, LookupError, OverflowError, MemoryError) as error:
        text = f"{path} is not a complete GGUF file of version 2 or 3; download it again"
        raise ModelError(text) from error


def _config(path: Path, fields: dict[str, Any], shapes: dict[str, list[int]]) -> dict[str, Any]:
    kind = fields.get("general.architecture")
    if kind not in ("qwen3", "qwen3moe"):
        raise ModelError(f"{path}: general.architecture: got {kind!r}, expected qwen3 or qwen3moe")
    if fields.get("split.count", 1) > 1:
        raise ModelError(
            f"{path}: split.count: got {fields['split.count']}, expected one file; merge "
            "the parts with `llama-gguf-split --merge`"
        )
    if len(shapes.get("token_embd.weight", ())) != 2:
        raise ModelError(f"{path} has no token_embd.weight; a checkpoint needs it")
    scaling = fields.get(f"{kind}.rope.scaling.type", "none")

    def get(name: str) -> Any:
        if (field := f"{kind}.{name}") not in fields:
            raise ModelError(f"{path} has no {field}; a checkpoint needs it")
        return fields[field]

    config = {
        "architectures": [ARCHITECTURE if kind == "qwen3" else MOE_ARCHITECTURE],
        "model_type": "qwen3" if kind == "qwen3" else "qwen3_moe",
        "torch_dtype": "bfloat16",
        "vocab_size": shapes["token_embd.weight"][1],
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": get("attention.key_length"),
        "max_position_embeddings": get("context_length"),
        "rope_theta": get("rope.freq_base"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in shapes,
        "eos_token_id": _ends(fields),
    }
    if scaling != "none":
        config["rope_scaling"] = {
            "rope_type": scaling,
            "factor": get("rope.scaling.factor"),
            "original_max_position_embeddings": get("rope.scaling.original_context_length"),
        }
    if kind == "qwen3moe":
        config |= {
            "num_experts": get("expert_count"),
            "num_experts_per_tok": get("expert_used_count"),
            "moe_intermediate_size": get("expert_feed_forward_length"),
            "norm_topk_prob": True,
        }
    return config


def _quantization(plain: list[str]) -> dict[str, Any]:
    """Return the format of packed matrices as in compressed-tensors; plain: all other layers."""
    weights = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": GROUP}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": [*plain, "lm_head"],
    }


def _shards(reader: GGUFReader) -> list[list[ReaderTensor]]:
    """Return the tensors of each layer, and the tensors outside of layers."""
    shards: dict[str, list[ReaderTensor]] = {}
    for tensor in reader.tensors:
        layer = tensor.name.split(".")[1] if tensor.name.startswith("blk.") else ""
        shards.setdefault(layer, []).append(tensor)
    return list(shards.values())


def _add(tensors: Tensors, path: Path, tensor: ReaderTensor) -> list[str]:
    """Add a tensor under its names in Hugging Face's format; return its layers in bfloat16."""
    stem, _, end = tensor.name.rpartition(".")
    part, number = stem, ""
    if stem.startswith("blk."):
        number, _, part = stem.removeprefix("blk.").partition(".")
    prefix = f"model.layers.{number}." if number else ""
    name = (MATRICES | OTHERS if number else TOP).get(part)
    if name is None or end != "weight":
        raise ModelError(f"{path}: got a tensor {tensor.name}, expected those of Qwen3 only")
    is_packed = part in MATRICES and number and tensor.tensor_type not in _PLAIN
    plain = []
    matrices = tensor.data if "{}" in name else [tensor.data]
    for expert, data in enumerate(matrices):
        layer = prefix + name.format(expert)
        if is_packed:
            tensors |= _packed(layer, data, tensor.tensor_type)
        else:
            tensors[f"{layer}.weight"] = _bfloat16(dequantize(data, tensor.tensor_type))
            plain += [layer] if part in MATRICES else []
    return plain


def _packed(layer: str, data: NDArray[Any], kind: GGMLQuantizationType) -> Tensors:
    """Return a matrix as 8-bit integers, four in a word, with a scale for each group."""
    if kind == GGMLQuantizationType.Q8_0:
        blocks = np.ascontiguousarray(data).reshape(data.shape[0], -1, 2 + GROUP)
        scale = blocks[:, :, :2].copy().view(np.float16)[..., 0]
        codes = blocks[:, :, 2:].copy().view(np.int8)
    else:
        numbers = dequantize(data, kind).reshape(data.shape[0], -1, GROUP)
        scale = (np.abs(numbers).max(-1) / 127).astype(np.float16)
        steps = np.where(scale == 0, 1, scale).astype(np.float32)[..., None]
        codes = np.clip(np.rint(numbers / steps), -127, 127).astype(np.int8)
    rows = codes.shape[0]
    words = (codes.view(np.uint8) ^ 0x80).reshape(rows, -1).view(np.int32)
    shape = np.array([rows, codes.shape[1] * GROUP], np.int64)
    return {
        f"{layer}.weight_packed": ("I32", words),
        f"{layer}.weight_scale": ("F16", scale),
        f"{layer}.weight_shape": ("I64", shape),
    }


def _bfloat16(numbers: NDArray[Any]) -> tuple[str, NDArray[Any]]:
    return "BF16", quantize(numbers, GGMLQuantizationType.BF16).view(np.uint16)


def _save(path: Path, tensors: Tensors) -> None:
    """Write a file of safetensors; the safetensors library for numpy lacks bfloat16.

    The format: https://huggingface.co/docs/safetensors.
    """
    header, begin = {}, 0
    for name, (dtype, data) in tensors.items():
        end = begin + data.nbytes
        header[name] = {"dtype": dtype, "shape": data.shape, "data_offsets": [begin, end]}
        begin = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for _, data in tensors.values():
            file.write(np.ascontiguousarray(data).data)


def _ends(fields: dict[str, Any]) -> list[int]:
    """Return the ids that end a text: those in the file, and Qwen3's, which are found by name."""
    tokens = fields.get("tokenizer.ggml.tokens", [])
    named = [number for number, token in enumerate(tokens) if token in _ENDS]
    own = fields.get("tokenizer.ggml.eos_token_id")
    return list(dict.fromkeys([*([] if own is None else [int(own)]), *named]))


def write_tokenizer(path: Path, fields: dict[str, Any], folder: Path) -> None:
    """Write the tokenizer that the fields of a GGUF file describe. Raises ModelError."""
    kind = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != ("gpt2", "qwen2"):
        raise ModelError(f"{path}: tokenizer.ggml.model and pre: got {kind}, expected gpt2, qwen2")
    tokens, types, merges = (
        fields.get(f"tokenizer.ggml.{name}", []) for name in ("tokens", "token_type", "merges")
    )
    if not tokens or len(types) != len(tokens):
        raise ModelError(
            f"{path}: tokenizer.ggml.token_type: got {len(types)}, expected one for "
            f"each of {len(tokens)} tokens"
        )
    added = [
        {"id": number, "content": token, "special": of_type == _CONTROL, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for number, (token, of_type) in enumerate(zip(tokens, types, strict=True))
        if of_type in (_CONTROL, _USER_DEFINED)
    ]
    vocab = {token: number for number, token in enumerate(tokens) if types[number] == _NORMAL}
    bytes_alone = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    split = {"type": "Split", "pattern": {"Regex": _WORDS}, "behavior": "Isolated", "invert": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split, bytes_alone | {"use_regex": False}],
        },
        "post_processor": bytes_alone | {"use_regex": False},
        "decoder": bytes_alone | {"use_regex": False},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    _write(folder / "tokenizer.json", tokenizer)
    end = next((tokens[token] for token in _ends(fields) if token < len(tokens)), None)
    config = {"eos_token": end, "chat_template": fields.get("tokenizer.chat_template")}
    _write(folder / "tokenizer_config.json", config)


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False))
