"""The demo models' shapes, and their checkpoints in the files that Hugging Face's Qwen has."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3_5ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.tools.demo import tokenizer
from tests.tools.demo.hybrid import CHUNK, Hybrid

DEMOS = Path(__file__).parents[3] / "models" / "demo"
CHECKPOINT_FOLDER, HYBRID_FOLDER = DEMOS / "checkpoint", DEMOS / "hybrid"
WEIGHTS_FILE = "model.safetensors"
TOKENIZER_FILES = "tokenizer.json", "tokenizer_config.json"

_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": tokenizer.END_OF_TEXT_ID,
    "eos_token_id": tokenizer.IM_END_ID,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 768,
    "max_position_embeddings": tokenizer.MAX_LENGTH,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 100000.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": tokenizer.VOCAB_SIZE,
}
HYBRID_CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "bos_token_id": tokenizer.END_OF_TEXT_ID,
    "dtype": "bfloat16",
    "eos_token_id": tokenizer.IM_END_ID,
    "full_attention_interval": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 768,
    "layer_types": [*3 * ["linear_attention"], "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 32,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": tokenizer.MAX_LENGTH,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "output_gate_type": "swish",
    "pad_token_id": None,
    "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 1.0,
        "rope_theta": 100000.0,
        "rope_type": "default",
    },
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": tokenizer.VOCAB_SIZE,
}
_GENERATION_CONFIG = {
    "bos_token_id": tokenizer.END_OF_TEXT_ID,
    "do_sample": False,
    "eos_token_id": [tokenizer.IM_END_ID, tokenizer.END_OF_TEXT_ID],
    "pad_token_id": tokenizer.END_OF_TEXT_ID,
}


def new_model(*, hybrid: bool) -> nn.Module:
    """Return a model with random weights, in float32."""
    if hybrid:
        return Hybrid(HYBRID_CONFIG)
    return Qwen3ForCausalLM(Qwen3Config.from_dict({**_CONFIG, "torch_dtype": "float32"}))


def is_hybrid(folder: Path) -> bool:
    """Return True for the checkpoint of a hybrid model."""
    config = json.loads((folder / "config.json").read_bytes())
    return config["architectures"] == HYBRID_CONFIG["architectures"]


def load_model(folder: Path) -> Qwen3ForCausalLM | Qwen3_5ForCausalLM:
    """Return the model of transformers, its bfloat16 weights widened to float32."""
    family = Qwen3_5ForCausalLM if is_hybrid(folder) else Qwen3ForCausalLM
    return family.from_pretrained(folder, dtype=torch.float32)


def load_hybrid(folder: Path) -> Hybrid:
    """Return the hybrid model with its MTP layer, its weights widened to float32."""
    model = Hybrid(HYBRID_CONFIG)
    model.load_state_dict(load_file(folder / WEIGHTS_FILE))
    return model


def load_trained(folder: Path) -> nn.Module:
    """Return the model as it was trained."""
    return load_hybrid(folder) if is_hybrid(folder) else load_model(folder)


def logits_of(model: nn.Module, token_ids: Tensor) -> Tensor:
    """Return the logits [rows, length, vocab_size]."""
    if not isinstance(model, Hybrid):
        return model(token_ids, use_cache=False).logits
    length = token_ids.shape[1]
    padded = functional.pad(token_ids, (0, -length % CHUNK))
    logits = model.logits(model.hidden(padded))
    return logits.unflatten(0, padded.shape)[:, :length]


def save_checkpoint(model: nn.Module, folder: Path) -> Path:
    """Write configuration, tokenizer and bfloat16 weights; return the path of the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", HYBRID_CONFIG if isinstance(model, Hybrid) else _CONFIG)
    _write_json(folder / "generation_config.json", _GENERATION_CONFIG)
    weights = {
        name: parameter.detach().to("cpu", torch.bfloat16).contiguous()
        for name, parameter in model.named_parameters()
    }
    path = folder / WEIGHTS_FILE
    save_file(weights, path, metadata={"format": "pt"})
    shutil.copymode(folder / "config.json", path)  # save_file ignores the umask
    for name in TOKENIZER_FILES:  # of `tokenizer.save_tokenizer`
        if folder != CHECKPOINT_FOLDER:
            shutil.copyfile(CHECKPOINT_FOLDER / name, folder / name)
    return path


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
