"""Checkpoints with random weights in the published shapes of Qwen3 and Qwen3.5, for benchmarks.

`launch bench make-model` runs this module. The checkpoint contains the tensors that the model
loads. Its tokenizer has Qwen3's number of tokens and special tokens, but different merges.
"""

import argparse
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from penstock.kernels.elementwise import quantize_blocks
from penstock.models.architecture import describe
from penstock.models.weights import SCALES
from penstock.protocol.checkpoint import (
    ARCHITECTURE,
    MOE_ARCHITECTURE,
    ModelConfig,
    read_model_config,
)
from penstock.protocol.checkpoint_files import INDEX_FILE
from penstock.protocol.quantization import FP8_BLOCKS
from penstock.protocol.tokenizer_file import byte_characters

# configuration that provides the chat template
DEMO_TOKENIZER = Path(__file__).parent / "demo" / "checkpoint" / "tokenizer_config.json"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
VOCAB_SIZE, HYBRID_VOCAB_SIZE = 151_936, 248_320
NUM_BYTE_PAIRS = 151_643  # ids of ordinary tokens; special tokens follow
SPECIAL_IDS = {
    "<|endoftext|>": 151_643,
    "<|im_start|>": 151_644,
    "<|im_end|>": 151_645,
    "<tool_call>": 151_657,
    "</tool_call>": 151_658,
    "<tool_response>": 151_665,
    "</tool_response>": 151_666,
    "<think>": 151_667,
    "</think>": 151_668,
}
DENSE = {
    # hidden_size, intermediate_size, layers, heads, KV heads, whether the embedding is also the
    # head
    "0.6B": (1024, 3072, 28, 16, 8, True),
    "1.7B": (2048, 6144, 28, 16, 8, True),
    "4B": (2560, 9728, 36, 32, 8, True),
    "8B": (4096, 12288, 36, 32, 8, False),
    "14B": (5120, 17408, 40, 40, 8, False),
    "32B": (5120, 25600, 64, 64, 8, False),
    "30B-A3B": (2048, 6144, 48, 32, 4, False),
}
EXPERTS = {
    "30B-A3B": {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
}
HYBRID = {
    # hidden_size, intermediate_size, layers, heads, KV heads, linear value heads, whether the
    # embedding is also the head
    "3.5-0.8B": (1024, 3584, 24, 8, 2, 16, True),
    "3.5-4B": (2560, 9216, 32, 16, 4, 32, True),
    "3.5-9B": (4096, 12288, 32, 16, 4, 32, False),
    "3.5-27B": (5120, 17408, 64, 24, 4, 48, False),
    "3.5-35B-A3B": (2048, 512, 40, 16, 2, 32, False),
}
HYBRID_EXPERTS = {
    "3.5-35B-A3B": {
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }
}
MAX_SHARD_BYTES = 4 << 30
DEVIATION = 0.02  # standard deviation of the weights
GROUP = 128
CODE_DEVIATION = 4.6  # standard deviation of uniform codes 0 to 15
# format → `quantization_config`
FORMATS: dict[str, dict[str, Any]] = {
    "fp8": FP8_BLOCKS,
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "checkpoint_format": "gptq",
        "desc_act": False,
        "sym": True,
    },
}


def shape_of(size: str) -> dict[str, Any]:
    """Return the fields of a published size in `config.json`."""
    if size in HYBRID:
        return _hybrid_shape(size)
    hidden, intermediate, layers, heads, kv_heads, is_tied = DENSE[size]
    experts = EXPERTS.get(size, {})
    return {
        "architectures": [MOE_ARCHITECTURE if experts else ARCHITECTURE],
        "model_type": "qwen3_moe" if experts else "qwen3",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "tie_word_embeddings": is_tied,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": SPECIAL_IDS["<|endoftext|>"],
        "eos_token_id": SPECIAL_IDS["<|im_end|>"],
        **experts,
    }


def _hybrid_shape(size: str) -> dict[str, Any]:
    hidden, intermediate, layers, heads, kv_heads, value_heads, is_tied = HYBRID[size]
    experts = HYBRID_EXPERTS.get(size, {})
    return {
        **shape_of("8B"),
        "architectures": ["Qwen3_5MoeForCausalLM" if experts else "Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_moe_text" if experts else "qwen3_5_text",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "mtp_num_hidden_layers": 1,
        "tie_word_embeddings": is_tied,
        "vocab_size": HYBRID_VOCAB_SIZE,
        "max_position_embeddings": 262_144,
        "rope_theta": 10_000_000.0,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
        },
        **experts,
    }


def make_checkpoint(
    folder: Path, shape: dict[str, Any], dtype: str = "bfloat16", quantization: str | None = None
) -> int:
    """Write a checkpoint into `folder` and return the bytes of its weights.

    quantization: format of the layers' linear weights, one of FORMATS.
    """
    folder.mkdir(parents=True, exist_ok=True)
    described = {"quantization_config": FORMATS[quantization]} if quantization else {}
    _write_json(folder / "config.json", {**shape, "torch_dtype": dtype, **described})
    end_ids = [SPECIAL_IDS["<|im_end|>"], SPECIAL_IDS["<|endoftext|>"]]
    sampling = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    _write_json(folder / "generation_config.json", {"eos_token_id": end_ids, **sampling})
    _save_tokenizer(folder)
    config = read_model_config(folder)
    config = msgspec.structs.replace(config, reads_mtp=config.is_hybrid)
    return _save(folder, _tensors(config, DTYPES[dtype], quantization))


def _tensors(
    config: ModelConfig, dtype: torch.dtype, quantization: str | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the checkpoint."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    noise = torch.Generator(device).manual_seed(0)
    for weight in describe(config).weights:
        for name in weight.names():
            if len(weight.shape) == 1:  # weight of a norm, or of a decay
                number = 0.0 if weight.is_float32 else 1.0
                yield name, torch.full(weight.shape, number, dtype=dtype)
                continue
            numbers = torch.empty(weight.shape, dtype=dtype, device=device)
            is_convolution = len(weight.shape) == 3
            numbers.normal_(0, 0.5 if is_convolution else DEVIATION, generator=noise)
            if not quantization or not weight.is_matrix:
                yield name, numbers.cpu()
            elif quantization == "fp8":
                quantized = quantize_blocks(numbers)
                yield name, quantized.values.cpu()
                yield f"{name}{SCALES}", quantized.scale.cpu()
            else:
                module = name.removesuffix(".weight")
                rows, columns = weight.shape
                for end, tensor in _integers(rows, columns, quantization, noise).items():
                    yield f"{module}.{end}", tensor.cpu()


def _integers(
    rows: int, columns: int, quantization: str, noise: torch.Generator
) -> dict[str, Tensor]:
    """Return random 4-bit tensors of AWQ or GPTQ whose numbers have the usual deviation."""
    groups = -(-columns // GROUP)

    def words(*shape: int) -> Tensor:
        octets = torch.empty(*shape, 4, dtype=torch.uint8, device=noise.device)
        return octets.random_(0, 256, generator=noise).view(torch.int32).squeeze(-1)

    scales = torch.full((groups, rows), DEVIATION / CODE_DEVIATION, dtype=torch.float16)
    zeros = torch.full((groups, rows // 8), 0x77777777, dtype=torch.int32)
    if quantization == "awq":
        return {"qweight": words(columns, rows // 8), "qzeros": zeros, "scales": scales}
    index = torch.arange(columns, dtype=torch.int32) // GROUP
    return {"qweight": words(columns // 8, rows), "qzeros": zeros, "scales": scales, "g_idx": index}


def _save(folder: Path, tensors: Iterator[tuple[str, Tensor]]) -> int:
    """Write shards of up to MAX_SHARD_BYTES, and their index."""
    files: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    total = shard_bytes = 0
    end: tuple[str, Tensor | None] = ("", None)
    for name, tensor in itertools.chain(tensors, [end]):
        if tensor is None or (shard and shard_bytes + tensor.nbytes > MAX_SHARD_BYTES):
            file = f"model-{len(set(files.values())) + 1:05}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            shutil.copymode(folder / "config.json", folder / file)  # save_file ignores the umask
            files |= dict.fromkeys(shard, file)
            total, shard, shard_bytes = total + shard_bytes, {}, 0
        if tensor is not None:
            shard[name] = tensor
            shard_bytes += tensor.nbytes
    _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": files})
    return total


def _save_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE of all bytes, all pairs of bytes, and triples."""
    characters = byte_characters()
    pairs = list(itertools.product(characters, characters))
    triples = itertools.product(("".join(pair) for pair in pairs), characters)
    merges = [*pairs, *itertools.islice(triples, NUM_BYTE_PAIRS - len(characters) - len(pairs))]
    tokens = [*characters, *("".join(merge) for merge in merges)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    by_id = {number: token for token, number in SPECIAL_IDS.items()}
    last = max(by_id)
    names = (by_id.get(number, f"<|extra_{number}|>") for number in range(NUM_BYTE_PAIRS, last + 1))
    added = [AddedToken(name, special=name.startswith("<|"), normalized=False) for name in names]
    tokenizer.add_tokens(added)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    template = json.loads(DEMO_TOKENIZER.read_bytes())["chat_template"]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    _write_json(folder / "tokenizer_config.json", config | ends)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Make a checkpoint from the command line and print its size."""
    parser = argparse.ArgumentParser()
    parser.add_argument("size", choices=[*DENSE, *HYBRID])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--quantization", choices=FORMATS)
    parser.add_argument("--layers", type=int)
    given = parser.parse_args()
    shape = shape_of(given.size)
    if given.layers:
        shape["num_hidden_layers"] = given.layers
    try:
        num_bytes = make_checkpoint(given.folder, shape, given.dtype, given.quantization)
    except (OSError, SafetensorError) as error:
        raise SystemExit(f"launch: FOLDER: {given.folder} can't be filled: {error}") from None
    print(f"{given.folder}: {num_bytes / (1 << 30):.2f} GiB of random weights")


if __name__ == "__main__":
    main()
