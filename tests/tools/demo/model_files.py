"""The demo model's shape, and its checkpoint in the files that Hugging Face's Qwen3 has."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from penstock.protocol.config import Config
from tests.tools.demo import tokenizer

CHECKPOINT_FOLDER = Config().model_folder

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
_GENERATION_CONFIG = {
    "bos_token_id": tokenizer.END_OF_TEXT_ID,
    "do_sample": False,
    "eos_token_id": [tokenizer.IM_END_ID, tokenizer.END_OF_TEXT_ID],
    "pad_token_id": tokenizer.END_OF_TEXT_ID,
}


def new_model() -> Qwen3ForCausalLM:
    """Return the model with random weights, in float32."""
    config = Qwen3Config.from_dict({**_CONFIG, "torch_dtype": "float32"})
    model: Qwen3ForCausalLM = Qwen3ForCausalLM(config)
    return model


def load_model(folder: Path) -> Qwen3ForCausalLM:
    """Return the model of a checkpoint, its bfloat16 weights widened to float32."""
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)


def save_checkpoint(model: Qwen3ForCausalLM, folder: Path) -> Path:
    """Write configuration, tokenizer and bfloat16 weights; return the path of the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", _CONFIG)
    _write_json(folder / "generation_config.json", _GENERATION_CONFIG)
    tokenizer.save_tokenizer(folder)
    weights = {
        name: parameter.detach().to("cpu", torch.bfloat16).contiguous()
        for name, parameter in model.named_parameters()
    }
    path = folder / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    shutil.copymode(folder / "config.json", path)  # save_file ignores the umask
    return path


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
