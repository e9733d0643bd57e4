"""Random Qwen3 checkpoints, as transformers writes them."""

import shutil
from pathlib import Path

import torch
from torch import nn
from transformers import (
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from penstock.protocol.config import Config

SHAPE = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    # large enough that every weight shows in the logits
    "initializer_range": 0.2,
}
EXPERTS = {
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
}
"""a mixture of experts, in the layers 0 and 2"""


def save_checkpoint(folder: Path, max_shard_size: str = "1GB", **shape: object) -> PreTrainedModel:
    """Write a random checkpoint of `SHAPE`, changed by `shape`, and return its model.

    The tokenizer is the demo model's.
    """
    torch.manual_seed(0)
    shape = {**SHAPE, **shape}
    if "num_experts" in shape:
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)).eval()
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape)).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    shutil.copy(Config().model_folder / "tokenizer.json", folder)
    return model
