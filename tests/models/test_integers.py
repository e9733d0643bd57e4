"""Weights of integers on a CPU: the logits are near those of the numbers that they stand for."""

from pathlib import Path

import pytest
from torch import Tensor

from penstock.kernels.cpu.integers import quantize
from penstock.models.compiled import CompiledDecoder
from penstock.protocol.checkpoint import read_model_config
from tests.models.checkpoints import save_checkpoint
from tests.models.forward import load_model, prefill_logits, random_prompts

SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}


MAX_ERROR = 0.04
"""of two layers and a head whose activations are rounded to 8 bits; 0.027 was measured"""


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("bits", [8, 4])
def test_logits_are_near_those_of_the_dequantized_weights(tmp_path: Path, bits: int) -> None:
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
    assert relative_error(logits, prefill_logits(expected, prompts)) < MAX_ERROR
    assert bits == 8 or relative_error(logits, before) > 5 * MAX_ERROR
