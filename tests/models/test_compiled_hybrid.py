"""Compiled layers of hybrid models: the results of torch, in bits that depend on nothing else."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.kernels.cpu import compiled_layers, compiler
from penstock.kernels.linear import linear
from penstock.kernels.linear.batch_invariant import product
from penstock.kernels.packed.matrices import quantize
from penstock.models import compiled
from tests.kernels.cpu.layers_case import avx2, rounded
from tests.models.forward import (
    load_model,
    mtp_logits,
    prefill_logits,
    prefill_step,
    random_prompts,
)
from tests.models.hybrid import EXPERTS, add_mtp, save_hybrid, split_experts
from tests.models.stored_formats import awq, quantize_checkpoint
from tests.models.test_integers import num_integers, relative_error

SHAPE = {"linear_key_head_dim": 32, "linear_value_head_dim": 48, "initializer_range": 0.05}
WHOLE_GROUPS = {**SHAPE, "hidden_size": 128, "intermediate_size": 192}
LENGTHS = 1, 2, 17, 40
PROMPTS = random_prompts(264, *LENGTHS)


def wide() -> compiler.Target:
    """Return this CPU with vectors of 16 float32, as with AVX-512."""
    own = compiler.host()
    return compiler.target(own.name, own.features, has_wide_registers=True)


@pytest.mark.parametrize("make_target", [compiler.host, avx2, wide])
def test_layers_compute_what_torch_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_target: Callable[[], compiler.Target]
) -> None:
    save_hybrid(tmp_path, **SHAPE)
    target = make_target()
    for module in compiler, compiled_layers, compiled:
        monkeypatch.setattr(module, "host", lambda: target)
    model = load_model(tmp_path)
    logits, expected = (
        prefill_logits(one, PROMPTS) for one in (model, load_model(tmp_path, is_compiled=False))
    )
    assert logits is not None and expected is not None
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0.0)
    for prompt, together in zip(PROMPTS, logits.split(LENGTHS), strict=True):
        alone = prefill_logits(model, [prompt])
        assert alone is not None and torch.equal(alone, together)


def test_bits_do_not_depend_on_the_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_hybrid(tmp_path, **SHAPE)
    expected = prefill_logits(load_model(tmp_path), PROMPTS)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(compiled_layers, "_num_threads", lambda *_: 3)
    logits = prefill_logits(load_model(tmp_path), PROMPTS)
    assert expected is not None and logits is not None and torch.equal(logits, expected)


@torch.inference_mode()
def test_a_row_without_a_state_block_changes_none(tmp_path: Path) -> None:
    save_hybrid(tmp_path, **SHAPE)
    model = load_model(tmp_path)
    step, kv_caches = prefill_step(model, PROMPTS, 16)
    assert step.states
    before = [[tensor.clone() for tensor in layer] for layer in step.states.layers]
    nowhere = step.states._replace(written=torch.full_like(step.states.written, -1))
    hidden_states = model(step._replace(states=nowhere), kv_caches)
    for layer, old in zip(step.states.layers, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(layer, old, strict=True)) or all(
            tensor.isnan().all() for tensor in layer
        )
    assert torch.equal(hidden_states, model(step, kv_caches))


@pytest.mark.parametrize("bits", [8, 4])
def test_logits_are_those_of_the_dequantized_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int
) -> None:
    """Torch is given the activations that the products with integers take."""

    def rounding_product(x: Tensor, weight: Tensor) -> Tensor:
        is_float = len(weight) in (2 * model.config.linear_num_value_heads, len(model.head.weight))
        return product(x if is_float else rounded(x), weight)

    save_hybrid(tmp_path, **WHOLE_GROUPS)
    expected, model = (load_model(tmp_path, is_compiled=False) for _ in range(2))
    for name, matrix in expected.model.layers.named_parameters():
        if matrix.ndim == 2 and "ba_proj" not in name:
            matrix.data = quantize(matrix, bits).dequantized()
    model.compiled = compiled.CompiledDecoder(model, model.config, bits)
    logits = prefill_logits(model, PROMPTS)
    monkeypatch.setattr(linear, "product", rounding_product)
    assert relative_error(logits, prefill_logits(expected, PROMPTS)) < 0.01


def test_a_packed_checkpoint_with_experts(tmp_path: Path) -> None:
    """The shared expert and the layer that drafts run in torch, which needs floats."""
    sizes = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    model = save_hybrid(tmp_path, **WHOLE_GROUPS, **EXPERTS | sizes)
    split_experts(tmp_path)
    add_mtp(tmp_path, model)
    quantize_checkpoint(tmp_path, awq(32, modules_to_not_convert=["in_proj_qkv", "in_proj_z"]))
    choices = {"speculative_method": "mtp"}
    found = load_model(tmp_path, keeps_integers=True, **choices)
    expected = load_model(tmp_path, is_compiled=False, **choices)
    assert found.compiled and num_integers(found) > 0
    for logits in prefill_logits, mtp_logits:
        assert relative_error(logits(found, PROMPTS), logits(expected, PROMPTS)) < 0.2
