"""A checkpoint of Qwen3-0.6B's shape with random weights, and the memory that making it takes."""

import gc
import shutil
from pathlib import Path

import torch

from penstock.protocol.config import Config
from tests.models.checkpoints import save_checkpoint

LAYERS = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
SMALL = LAYERS | {
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}


def save_small(folder: Path, **changed: object) -> None:
    """Write a checkpoint of `SMALL`, changed, with the demo model's tokenizer."""
    with torch.device("cuda"):
        save_checkpoint(folder, **SMALL | changed)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Config().model_folder / name, folder)
    release()


def release() -> None:
    """Free the GPU memory that this process holds and workers need."""
    gc.collect()
    torch.cuda.empty_cache()
