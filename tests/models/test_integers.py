"""Weights of integers on a CPU: the logits are those of the numbers that they stand for."""

from pathlib import Path

import pytest
import torch

from penstock.kernels.cpu.integers import quantize
from penstock.models.compiled import CompiledDecoder
from penstock.protocol.checkpoint import read_model_config
from tests.models.checkpoints import save_checkpoint
from tests.models.forward import load_model, prefill_logits, random_prompts

SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}


@pytest.mark.parametrize("bits", [8, 4])
def test_logits_are_those_of_the_dequantized_weights(tmp_path: Path, bits: int) -> None:
    save_checkpoint(tmp_path, **SIZES, tie_word_embeddings=False)
    config = read_model_config(tmp_path)
    prompts = random_prompts(config.vocab_size, 1, 30, 140)
    expected, model = (load_model(tmp_path, is_compiled=False) for _ in range(2))
    before = prefill_logits(expected, prompts)
    for matrix in expected.model.layers.parameters():
        if matrix.ndim == 2:
            matrix.data = quantize(matrix, bits).dequantized()
    expected.lm_head.weight.data = quantize(expected.lm_head.weight, 8).dequantized()
    model.compiled = CompiledDecoder(model, config, bits, quantize_lm_head=True)
    logits = prefill_logits(model, prompts)
    torch.testing.assert_close(logits, prefill_logits(expected, prompts), atol=1e-4, rtol=0.0)
    assert not torch.allclose(logits, before, atol=1e-3)
