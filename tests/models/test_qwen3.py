"""The logits of transformers' Qwen3ForCausalLM, from the same checkpoint, in float32."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from penstock.models.layers import rope_table
from penstock.models.weights import SINGLE_FILE
from penstock.protocol.checkpoint import Yarn, read_model_config
from penstock.protocol.config import Config
from tests.models.checkpoints import SHAPE, change_config, save_checkpoint
from tests.models.forward import load_model, prefill_logits, random_prompts
from tests.search import diagonal

TOLERANCE = {"atol": 1e-4, "rtol": 0.0}
DEMO = Config().model_folder


@torch.inference_mode()
def transformers_logits(model: Qwen3ForCausalLM, prompts: list[list[int]]) -> Tensor:
    """Return the logits after every token of the prompts, each prompt on its own."""
    return torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in prompts])


@pytest.mark.parametrize(
    ("tie_word_embeddings", "num_key_value_heads", "vocab_size", "is_compiled"),
    diagonal([False, True], [8, 4, 2, 1], [264, 333], [True, False]),
)
def test_logits_are_those_of_transformers(
    tmp_path: Path,
    tie_word_embeddings: bool,
    num_key_value_heads: int,
    vocab_size: int,
    is_compiled: bool,
) -> None:
    reference = save_checkpoint(
        tmp_path,
        vocab_size=vocab_size,
        tie_word_embeddings=tie_word_embeddings,
        num_key_value_heads=num_key_value_heads,
    )
    prompts = random_prompts(vocab_size, 1, 30, 150)
    logits = prefill_logits(load_model(tmp_path, is_compiled=is_compiled), prompts)
    assert logits is not None
    torch.testing.assert_close(logits, transformers_logits(reference, prompts), **TOLERANCE)


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_a_head_beside_a_tied_embedding_is_that_of_transformers(
    tmp_path: Path, scale: float
) -> None:
    """transformers ties the two if they are equal, whatever config.json says."""
    head = save_checkpoint(tmp_path, tie_word_embeddings=True).lm_head.weight
    tensors = load_file(tmp_path / SINGLE_FILE)
    tensors["lm_head.weight"] = head + scale * torch.randn_like(head)
    save_file(tensors, tmp_path / SINGLE_FILE, {"format": "pt"})
    reference = Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompts = random_prompts(264, 1, 30)
    logits = prefill_logits(load_model(tmp_path), prompts)
    assert logits is not None
    torch.testing.assert_close(logits, transformers_logits(reference, prompts), **TOLERANCE)


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize(
    "shape",
    [
        {"head_dim": 128, "hidden_size": 48, "intermediate_size": 100, "vocab_size": 1001},
        {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 33},
        {"hidden_size": 600, "intermediate_size": 1100, "num_hidden_layers": 1},
        {"rope_theta": 1e6, "rms_norm_eps": 1e-3, "num_hidden_layers": 5},
    ],
)
def test_logits_of_unusual_shapes(
    tmp_path: Path, shape: dict[str, object], is_compiled: bool
) -> None:
    reference = save_checkpoint(tmp_path, **{"initializer_range": 0.1, **shape})
    prompts = random_prompts(200, 40, 129)
    logits = prefill_logits(load_model(tmp_path, is_compiled=is_compiled), prompts)
    assert logits is not None
    torch.testing.assert_close(logits, transformers_logits(reference, prompts), **TOLERANCE)


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SCALINGS: list[dict[str, object]] = [
    {},
    {"rope_scaling": YARN},
    {"rope_scaling": {"rope_type": "yarn", "factor": 3.7, "beta_fast": 16, "beta_slow": 2}},
    {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}},
    {"rope_parameters": {**YARN, "rope_type": "yarn", "rope_theta": 5e5}},
    {"rope_scaling": {**YARN, "attention_factor": 1.25}},
    {"rope_scaling": {**YARN, "mscale": 0.8, "mscale_all_dim": 1.1, "truncate": False}},
    {"rope_scaling": {**YARN, "original_max_position_embeddings": 32768}},
    {"rope_scaling": {**YARN, "factor": None}},
    {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}},
]


@pytest.mark.parametrize(("head_dim", "fields"), diagonal([16, 64, 128], SCALINGS))
def test_rope_is_that_of_transformers(
    tmp_path: Path, fields: dict[str, object], head_dim: int
) -> None:
    written = {**SHAPE, "head_dim": head_dim, "architectures": ["Qwen3ForCausalLM"], **fields}
    if "full_attention" not in fields.get("rope_parameters", ()):  # type: ignore[operator]
        (tmp_path / "config.json").write_text(json.dumps(written))
        config = Qwen3Config.from_pretrained(tmp_path)
    else:  # its model reads no nested ones
        flat = {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}
        config = Qwen3Config(**{**written, **flat})
        (tmp_path / "config.json").write_text(json.dumps(written))
    positions = torch.arange(2000)
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), positions[None])
    rope = read_model_config(tmp_path).rope
    table = rope_table(head_dim, len(positions), rope.base, rope.yarn and Yarn(*rope.yarn))
    half = head_dim // 2
    torch.testing.assert_close(table[:, :half], cos[0, :, :half], atol=1e-6, rtol=0)
    torch.testing.assert_close(table[:, half:], sin[0, :, :half], atol=1e-6, rtol=0)


def test_logits_beyond_the_positions_of_the_training(tmp_path: Path) -> None:
    reference = save_checkpoint(tmp_path, rope_scaling=YARN)
    prompts = random_prompts(264, 20, 400)
    logits = prefill_logits(load_model(tmp_path), prompts)
    assert logits is not None
    torch.testing.assert_close(logits, transformers_logits(reference, prompts), **TOLERANCE)
    change_config(tmp_path, rope_parameters=None, rope_theta=10000.0)
    unscaled = prefill_logits(load_model(tmp_path), prompts)
    assert unscaled is not None
    assert (logits - unscaled).abs().max() > 0.1


def test_logits_of_the_demo_model() -> None:
    reference = Qwen3ForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    prompts = [list(b"count from 3 to 9"), list(b"repeat: the river and the turbine"), [0]]
    logits = prefill_logits(load_model(DEMO), prompts)
    assert logits is not None
    torch.testing.assert_close(logits, transformers_logits(reference, prompts), **TOLERANCE)
