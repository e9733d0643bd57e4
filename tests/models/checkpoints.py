"""Random Qwen3 checkpoints, as transformers writes them."""

import copy
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from penstock.models.architecture import describe
from penstock.protocol import checkpoint_files
from penstock.protocol.checkpoint import read_model_config
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


class Saved(NamedTuple):
    """A random checkpoint, and the state of torch's random numbers after it was made."""

    folder: Path
    model: PreTrainedModel
    random_state: Tensor


def save_checkpoint(folder: Path, max_shard_size: str = "1GB", **shape: object) -> PreTrainedModel:
    """Write a random checkpoint of `SHAPE`, changed by `shape`, and return its model.

    The tokenizer is the demo model's. A process makes each checkpoint once, on torch's default
    device, and keeps its model on the CPU.
    """
    device = str(torch.get_default_device())
    saved = _made(json.dumps({**SHAPE, **shape}), max_shard_size, device)
    shutil.copytree(saved.folder, folder, dirs_exist_ok=True)
    torch.set_rng_state(saved.random_state)
    return copy.deepcopy(saved.model)


made_folders: list[Path] = []


@functools.cache
@torch.inference_mode(False)  # other tests may compute gradients
def _made(shape_json: str, max_shard_size: str, device: str) -> Saved:
    torch.manual_seed(0)
    shape = json.loads(shape_json)
    with torch.device(device):
        if "num_experts" in shape:
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)).eval()
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**shape)).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    folder = Path(tempfile.mkdtemp())
    made_folders.append(folder)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    shutil.copy(Config().model_folder / "tokenizer.json", folder)
    return Saved(folder, model.cpu(), torch.get_rng_state())


def change_config(folder: Path, **fields: object) -> None:
    """Change fields of `config.json`; None removes one."""
    path = folder / "config.json"
    changed = json.loads(path.read_text()) | fields
    for name in [name for name, value in fields.items() if value is None]:
        del changed[name]
    path.write_text(json.dumps(changed))


def check_tensors(folder: Path) -> None:
    """Raise ModelError for tensors that `config.json` contradicts."""
    config = read_model_config(folder)
    checkpoint_files.check_tensors(folder, config, describe(config).tensors())


def remove_made() -> None:
    """Remove the folders of all checkpoints that this process has made."""
    for folder in made_folders:
        shutil.rmtree(folder)
    made_folders.clear()
    _made.cache_clear()


MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {
        "idx": 2,
        "name": "2",
        "path": "2_Normalize",
        "type": "sentence_transformers.models.Normalize",
    },
]
LAST_TOKEN = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}


def save_embedding_model(folder: Path, **shape: object) -> PreTrainedModel:
    """Write a random checkpoint with the files and names of Qwen3-Embedding; return its model.

    Its tensors lack `model.`, and its tokenizer ends a text with <|endoftext|>.
    """
    torch.manual_seed(0)
    model = Qwen3Model(Qwen3Config(**{**SHAPE, **shape})).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    change_config(folder, architectures=["Qwen3ForCausalLM"])
    write_embedding_files(folder)
    tokenizer = Tokenizer.from_file(str(Config().model_folder / "tokenizer.json"))
    end = "<|endoftext|>"
    tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, tokenizer.token_to_id(end))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return model


def write_embedding_files(folder: Path) -> None:
    """Write what makes a checkpoint an embedding model of sentence-transformers."""
    (folder / "modules.json").write_text(json.dumps(MODULES))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling/config.json").write_text(json.dumps(LAST_TOKEN))
