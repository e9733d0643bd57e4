"""The logits of transformers' Qwen3ForCausalLM, from the same checkpoint, in float32."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from penstock.protocol.config import Config
from tests.models.checkpoints import save_checkpoint
from tests.models.forward import load_model, prefill_logits, random_prompts

TOLERANCE = {"atol": 1e-4, "rtol": 0.0}
DEMO = Config().model_folder


@torch.inference_mode()
def transformers_logits(model: Qwen3ForCausalLM, prompts: list[list[int]]) -> Tensor:
    """Logits behind every token of the prompts, each prompt on its own."""
    return torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in prompts])


@pytest.mark.parametrize("tie_word_embeddings", [False, True])
@pytest.mark.parametrize("num_key_value_heads", [8, 4, 2, 1])
@pytest.mark.parametrize("vocab_size", [264, 333])
def test_logits_are_those_of_transformers(
    tmp_path: Path, tie_word_embeddings: bool, num_key_value_heads: int, vocab_size: int
) -> None:
    reference = save_checkpoint(
        tmp_path,
        vocab_size=vocab_size,
        tie_word_embeddings=tie_word_embeddings,
        num_key_value_heads=num_key_value_heads,
    )
    prompts = random_prompts(vocab_size, 1, 30, 150)
    logits = prefill_logits(load_model(tmp_path), prompts)
    assert logits is not None
    torch.testing.assert_close(logits, transformers_logits(reference, prompts), **TOLERANCE)


@pytest.mark.parametrize(
    "shape",
    [
        {"head_dim": 128, "hidden_size": 48, "intermediate_size": 100, "vocab_size": 1001},
        {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 33},
        {"hidden_size": 600, "intermediate_size": 1100, "num_hidden_layers": 1},
        {"rope_theta": 1e6, "rms_norm_eps": 1e-3, "num_hidden_layers": 5},
    ],
)
def test_logits_of_unusual_shapes(tmp_path: Path, shape: dict[str, object]) -> None:
    reference = save_checkpoint(tmp_path, **{"initializer_range": 0.1, **shape})
    prompts = random_prompts(200, 40, 129)
    logits = prefill_logits(load_model(tmp_path), prompts)
    assert logits is not None
    torch.testing.assert_close(logits, transformers_logits(reference, prompts), **TOLERANCE)


def test_logits_of_the_demo_model() -> None:
    reference = Qwen3ForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    prompts = [list(b"count from 3 to 9"), list(b"repeat: the river and the turbine"), [0]]
    logits = prefill_logits(load_model(DEMO), prompts)
    assert logits is not None
    torch.testing.assert_close(logits, transformers_logits(reference, prompts), **TOLERANCE)
