"""Published checkpoints of the Qwen3 family: their `config.json`, and what becomes of them here."""

import json
from typing import Any, NamedTuple

from tests.models.checkpoints import LAST_TOKEN, MODULES

DENSE = {
    # hidden_size, intermediate_size, layers, heads, KV heads, whether the head is the embedding
    "0.6B": (1024, 3072, 28, 16, 8, True),
    "1.7B": (2048, 6144, 28, 16, 8, True),
    "4B": (2560, 9728, 36, 32, 8, True),
    "8B": (4096, 12288, 36, 32, 8, False),
    "14B": (5120, 17408, 40, 40, 8, False),
    "32B": (5120, 25600, 64, 64, 8, False),
}
SPARSE = {
    # hidden_size, intermediate_size, layers, heads, KV heads, experts, moe_intermediate_size
    "30B-A3B": (2048, 6144, 48, 32, 4, 128, 768),
    "235B-A22B": (4096, 12288, 94, 64, 4, 128, 1536),
    "Coder-30B-A3B": (2048, 5472, 48, 32, 4, 128, 768),
    "Coder-480B-A35B": (6144, 8192, 62, 96, 8, 160, 2560),
}
LONG = {"max_position_embeddings": 262_144, "rope_theta": 5_000_000}
LONG_SPARSE = {"max_position_embeddings": 262_144, "rope_theta": 10_000_000}
FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
AWQ = {
    "bits": 4,
    "group_size": 128,
    "modules_to_not_convert": None,
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}
GPTQ = {
    "bits": 4,
    "checkpoint_format": "gptq",
    "desc_act": False,
    "group_size": 128,
    "lm_head": False,
    "pack_dtype": "int32",
    "quant_method": "gptq",
    "sym": True,
}
COMPRESSED = {
    # format and activations → weights
    "pack-quantized W4A16": {"num_bits": 4, "strategy": "group", "group_size": 128},
    "pack-quantized W8A16": {"num_bits": 8, "strategy": "channel"},
    "int-quantized W8A8": {"num_bits": 8, "strategy": "channel"},
    "float-quantized W8A8": {"num_bits": 8, "type": "float", "strategy": "channel"},
}
EMBEDDING = {
    "modules.json": json.dumps(MODULES),
    "1_Pooling/config.json": json.dumps(LAST_TOKEN),
}
NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_num_value_heads": 32,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "partial_rotary_factor": 0.25,
    "shared_expert_intermediate_size": 512,
}
HYBRIDS = {
    # hidden_size, intermediate_size, layers, heads, KV heads, linear value heads, whether the head
    # is the embedding
    "0.8B": (1024, 3584, 24, 8, 2, 16, True),
    "4B": (2560, 9216, 32, 16, 4, 32, True),
    "9B": (4096, 12288, 32, 16, 4, 32, False),
    "27B": (5120, 17408, 64, 24, 4, 48, False),
    "35B-A3B": (2048, None, 40, 16, 2, 32, False),
}
HYBRID_EXPERTS = {
    "moe_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "shared_expert_intermediate_size": 512,
}
"""of 35B-A3B"""
UNQUANTIZED = (
    *("linear_attn.conv1d", "linear_attn.in_proj_a", "linear_attn.in_proj_b"),
    *("mlp.gate", "mlp.shared_expert_gate"),
)
"""modules of the layers"""


class Published(NamedTuple):
    """A checkpoint by its name on the hub, without `Qwen/`."""

    config: dict[str, Any]
    files: dict[str, str] = {}  # noqa: RUF012
    """further files that decide: name → content"""
    refusal: str = ""
    """part of the sentence; empty: it is served"""
    note: str = ""
    """for the table"""


def dense(size: str, **more: Any) -> dict[str, Any]:
    """Return the `config.json` of a dense model."""
    hidden, inner, layers, heads, kv_heads, is_tied = DENSE[size]
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151_643,
        "eos_token_id": 151_645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": inner,
        "max_position_embeddings": 40_960,
        "max_window_layers": layers,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1_000_000,
        "sliding_window": None,
        "tie_word_embeddings": is_tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151_936,
        **more,
    }


def sparse(size: str, **more: Any) -> dict[str, Any]:
    """Return the `config.json` of a mixture of experts."""
    hidden, inner, layers, heads, kv_heads, experts, expert_inner = SPARSE[size]
    fields = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "max_window_layers": layers,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": expert_inner,
        "norm_topk_prob": True,
        "num_attention_heads": heads,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
    }
    return dense("8B") | fields | more


def quantized(config: dict[str, Any], quantization: dict[str, Any]) -> dict[str, Any]:
    """Return a `config.json` of weights in another format."""
    return config | {"quantization_config": quantization}


def multimodal(architecture: str, inner: str, text: dict[str, Any]) -> dict[str, Any]:
    """Return a `config.json` with the language model's fields within `inner`."""
    nested = {"text_config": text} if inner == "thinker_config" else text
    return {"architectures": [architecture], inner: nested, "vision_config": {"depth": 24}}


def hybrid(size: str) -> dict[str, Any]:
    """Return the `config.json` of Qwen3.5, 3.6 or 3.8: a multimodal model."""
    hidden, inner, layers, heads, kv_heads, value_heads, is_tied = HYBRIDS[size]
    text = {
        "attention_bias": False,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248_044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * (layers // 4),
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262_144,
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "output_gate_type": "swish",
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10_000_000,
            "rope_type": "default",
        },
        "tie_word_embeddings": is_tied,
        "vocab_size": 248_320,
    }
    experts = {} if inner else HYBRID_EXPERTS
    text |= experts or {"intermediate_size": inner}
    family = "Qwen3_5Moe" if experts else "Qwen3_5"
    architecture = f"{family}ForConditionalGeneration"
    return multimodal(architecture, "text_config", text) | {"tie_word_embeddings": is_tied}


def _hybrid_models() -> dict[str, Published]:
    """Return models with linear attention."""
    note = "text only"
    models = {f"Qwen3.5-{size}": Published(hybrid(size), note=note) for size in HYBRIDS}
    for name in ("3.5-27B", "3.6-27B", "3.8-27B", "3.5-35B-A3B", "3.6-35B-A3B"):
        config = hybrid(name.partition("-")[2])
        models[f"Qwen{name}"] = Published(config, note=note)
        kept = [
            f"model.language_model.layers.{layer}.{module}"
            for layer in range(config["text_config"]["num_hidden_layers"])
            for module in UNQUANTIZED
        ]
        fp8 = FP8 | {"modules_to_not_convert": ["lm_head", "model.visual", "mtp.fc", *kept]}
        models[f"Qwen{name}-FP8"] = Published(quantized(config, fp8), note=note)
    for name in ("Next-80B-A3B-Instruct", "Next-80B-A3B-Thinking", "Coder-Next"):
        config = sparse("30B-A3B", **LONG_SPARSE) | NEXT
        models[f"Qwen3-{name}"] = Published(config)
        models[f"Qwen3-{name}-FP8"] = Published(quantized(config, FP8))
    return models


def _dense_models() -> dict[str, Published]:
    models = {}
    for size in DENSE:
        models[f"Qwen3-{size}"] = Published(dense(size))
        models[f"Qwen3-{size}-FP8"] = Published(quantized(dense(size), FP8))
    for size in ("0.6B", "1.7B", "4B", "8B", "14B"):
        base = {"eos_token_id": 151_643, "max_position_embeddings": 32_768}
        models[f"Qwen3-{size}-Base"] = Published(dense(size, **base))
    for size in ("4B", "8B", "14B", "32B"):
        models[f"Qwen3-{size}-AWQ"] = Published(quantized(dense(size), AWQ))
    for size in ("0.6B", "1.7B"):
        models[f"Qwen3-{size}-GPTQ-Int8"] = Published(quantized(dense(size), GPTQ | {"bits": 8}))
    for kind in ("Instruct", "Thinking"):
        models[f"Qwen3-4B-{kind}-2507"] = Published(dense("4B", **LONG))
        models[f"Qwen3-4B-{kind}-2507-FP8"] = Published(quantized(dense("4B", **LONG), FP8))
    return models


def _sparse_models() -> dict[str, Published]:
    models = {"Qwen3-30B-A3B-Base": Published(sparse("30B-A3B", max_position_embeddings=32_768))}
    for size, long in (("30B-A3B", LONG_SPARSE), ("235B-A22B", LONG)):
        models[f"Qwen3-{size}"] = Published(sparse(size))
        models[f"Qwen3-{size}-FP8"] = Published(quantized(sparse(size), FP8))
        models[f"Qwen3-{size}-GPTQ-Int4"] = Published(quantized(sparse(size), GPTQ))
        for kind in ("Instruct", "Thinking"):
            models[f"Qwen3-{size}-{kind}-2507"] = Published(sparse(size, **long))
            fp8 = quantized(sparse(size, **long), FP8)
            models[f"Qwen3-{size}-{kind}-2507-FP8"] = Published(fp8)
    for size in ("Coder-30B-A3B", "Coder-480B-A35B"):
        config = sparse(size, **LONG_SPARSE, qkv_bias=False, use_qk_norm=True)
        models[f"Qwen3-{size}-Instruct"] = Published(config)
        models[f"Qwen3-{size}-Instruct-FP8"] = Published(quantized(config, FP8))
    return models


ARCHITECTURE = "architectures: got .*, expected Qwen3ForCausalLM or Qwen3MoeForCausalLM or .*"


def _judges() -> dict[str, Published]:
    """Return models of embeddings, scores and verdicts."""
    models = {}
    for size in ("0.6B", "4B", "8B"):
        is_small = size == "0.6B"
        own = {"max_position_embeddings": 32_768, "vocab_size": 151_669}
        models[f"Qwen3-Embedding-{size}"] = Published(
            dense(size, eos_token_id=151_643, **(own if is_small else {"vocab_size": 151_665})),
            EMBEDDING,
            note="embeddings: [guide](../guides/embeddings.md)",
        )
        models[f"Qwen3-Reranker-{size}"] = Published(
            dense(size, tie_word_embeddings=True),
            note="scores, and text: [guide](../guides/embeddings.md)",
        )
    for size in ("0.6B", "4B", "8B"):
        models[f"Qwen3Guard-Gen-{size}"] = Published(
            dense(size, max_position_embeddings=32_768), note="judges as text"
        )
        models[f"Qwen3Guard-Stream-{size}"] = Published(
            dense(size, architectures=["Qwen3ForGuardModel"], max_position_embeddings=32_768),
            refusal=f"{ARCHITECTURE}; a classifier",
        )
    return models


def _other_generations() -> dict[str, Published]:
    """Return later models, and older ones."""
    models = {}
    later = multimodal("Qwen4ExpForConditionalGeneration", "text_config", hybrid("27B"))
    models["(Qwen4, `qwen4_exp`)"] = Published(later, refusal=f"{ARCHITECTURE}; Qwen4, .*sparse")
    older = {"Qwen2.5-7B-Instruct": "Qwen2", "QwQ-32B": "Qwen2", "Qwen1.5-MoE-A2.7B": "Qwen2Moe"}
    for name, family in older.items():
        models[name] = Published(
            dense("8B", architectures=[f"{family}ForCausalLM"], model_type=family.lower()),
            refusal=f"{ARCHITECTURE}; Qwen2.5 and older",
        )
    return models


def _others() -> dict[str, Published]:
    """Return what generates text in another way, or no text."""
    images = f"{ARCHITECTURE}; .*images"
    models = _other_generations()
    for size in ("2B", "4B", "8B", "32B"):
        text = dense("1.7B" if size == "2B" else size, **LONG)
        models[f"Qwen3-VL-{size}-Instruct"] = Published(
            multimodal("Qwen3VLForConditionalGeneration", "text_config", text), refusal=images
        )
    for size in ("30B-A3B", "235B-A22B"):
        text = sparse(size, **LONG)
        models[f"Qwen3-VL-{size}-Instruct"] = Published(
            multimodal("Qwen3VLMoeForConditionalGeneration", "text_config", text), refusal=images
        )
    models["Qwen3-Omni-30B-A3B-Instruct"] = Published(
        multimodal(
            "Qwen3OmniMoeForConditionalGeneration", "thinker_config", sparse("30B-A3B", **LONG)
        ),
        refusal=images,
    )
    for bits in (4, 6, 8):
        models[f"Qwen3-8B-MLX-{bits}bit"] = Published(
            quantized(dense("8B"), {"bits": bits, "group_size": 128}), refusal=f"{bits}-bit MLX"
        )
    models["Qwen3-8B-MLX-bf16"] = Published(dense("8B"))
    models["Qwen3-8B-GGUF"] = Published({}, {"Qwen3-8B-Q4_K_M.gguf": "GGUF"}, "GGUF.*one file")
    for name, weights in COMPRESSED.items():
        config = {
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "format": name.partition(" ")[0],
            "ignore": ["lm_head"],
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        }
        served = Published(quantized(dense("8B"), config), note="as llm-compressor writes it")
        models[f"(compressed-tensors, {name})"] = served
    return models


PUBLISHED = _dense_models() | _sparse_models() | _hybrid_models() | _judges() | _others()
