"""Weights in 8 bits: quantised when they are loaded, from 16 bits or from 8 with other scales."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.kernels.elementwise import quantize
from penstock.kernels.matrices import BLOCK, FP8, Quantized
from penstock.models.model import Model
from penstock.models.parallel import Layer
from penstock.models.tensor_parallel import TensorParallel
from penstock.models.weights import SCALES
from penstock.protocol.checkpoint import ModelError
from penstock.protocol.checkpoint_files import INDEX_FILE, SINGLE_FILE
from penstock.protocol.config import Config
from penstock.protocol.quantization import FP8_BLOCKS
from tests.gpu.accuracy import measure, num_right, tasks
from tests.models.checkpoints import EXPERTS, change_config, save_checkpoint
from tests.models.forward import load_model, prefill_logits, random_prompts
from tests.models.stored_formats import quantize_checkpoint_in_blocks
from tests.search import diagonal

SHAPE = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 40}
"""parts of two ranks that begin within a block"""
SPARSE = EXPERTS | {"hidden_size": 136, "moe_intermediate_size": 264}
"""as these"""
SHAPES = pytest.mark.parametrize("shape", [SHAPE, SPARSE], ids=["dense", "experts"])
WHOLE_AND_PARTS = [TensorParallel(), TensorParallel(0, 2), TensorParallel(1, 2)]


def weights(model: Model) -> dict[str, Tensor | Quantized]:
    """Return the weight of every layer."""
    return {name: one.weight for name, one in model.named_modules() if isinstance(one, Layer)}


def assert_same(found: Model, wanted: Model) -> None:
    for name, weight in weights(wanted).items():
        other = weights(found)[name]
        if isinstance(weight, Quantized):
            assert isinstance(other, Quantized)
            assert torch.equal(other.scale, weight.scale)
            assert torch.equal(other.values.float(), weight.values.float())
        else:
            assert isinstance(other, Tensor)
            assert torch.equal(other, weight)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "expert_parallel", "shape"), diagonal(WHOLE_AND_PARTS, [False, True], [SHAPE, SPARSE])
)
def test_each_row_of_a_ranks_part_is_quantised(
    tmp_path: Path, tp: TensorParallel, expert_parallel: bool, shape: dict[str, object]
) -> None:
    save_checkpoint(tmp_path, **shape)
    plain = load_model(tmp_path, tp, expert_parallel, is_compiled=False)
    found = load_model(tmp_path, tp, expert_parallel, quantization="fp8")
    num_quantized = 0
    for name, weight in weights(plain).items():
        other = weights(found)[name]
        assert isinstance(weight, Tensor)
        if "proj" not in name:
            assert isinstance(other, Tensor)
            assert torch.equal(other, weight)
            continue
        assert isinstance(other, Quantized)
        scale = other.scale[..., None]
        error = (other.values.float() * scale - weight).abs()
        step = torch.maximum(weight.abs() / 8, scale * 2**-9)
        assert (error <= 0.501 * step).all()
        torch.testing.assert_close(other.scale, weight.abs().amax(-1) / 448)
        num_quantized += 1
    assert num_quantized == len(found.model.layers) * 4


@SHAPES
def test_its_logits_are_those_of_what_it_stands_for(
    tmp_path: Path, shape: dict[str, object]
) -> None:
    save_checkpoint(tmp_path, **shape)
    model, other = load_model(tmp_path, quantization="fp8"), load_model(tmp_path)
    prompts = random_prompts(264, 1, 30)
    exact = prefill_logits(other, prompts)
    for name, weight in weights(model).items():
        if isinstance(weight, Quantized):
            its = other.get_submodule(name).weight
            its.copy_(weight.values.float() * weight.scale[..., None])
    found, wanted = prefill_logits(model, prompts), prefill_logits(other, prompts)
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=0.0)
    assert isinstance(exact, Tensor)
    assert isinstance(found, Tensor)
    assert 0.005 < (found - exact).norm() / exact.norm() < 0.4  # other experts may be chosen


@pytest.mark.parametrize("tie_word_embeddings", [True, False])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_head_alone_is_quantised(tmp_path: Path, size: int, tie_word_embeddings: bool) -> None:
    """The last of five ranks has rows of zeros after the vocabulary's end."""
    shape = {"num_attention_heads": 10, "num_key_value_heads": 5, "intermediate_size": 100}
    save_checkpoint(tmp_path, tie_word_embeddings=tie_word_embeddings, **shape)
    for rank in range(size):
        tp = TensorParallel(rank, size)
        plain = load_model(tmp_path, tp, is_compiled=False)
        found = load_model(tmp_path, tp, quantize_lm_head=True, is_compiled=False)
        assert isinstance(plain.head.weight, Tensor)
        wanted = quantize(plain.head.weight)
        head = found.head.weight
        assert isinstance(head, Quantized)
        num_own = found.head.stop - found.head.start
        assert torch.equal(head.values.float(), wanted.values.float())
        assert torch.equal(head.scale[:num_own], wanted.scale[:num_own])
        if not tie_word_embeddings:
            del plain.lm_head
        assert_same(found, plain)


def quantize_each(weight: Tensor) -> Quantized:
    """One matrix, or several."""
    if weight.ndim == 2:
        return quantize(weight)
    each = [quantize(one) for one in weight]
    return Quantized(torch.stack([e.values for e in each]), torch.stack([e.scale for e in each]))


def save_in_blocks(folder: Path, wide: Path, shape: dict[str, object]) -> dict[str, Tensor]:
    """Write a checkpoint in blocks, scales in a file of their own, and its values to `wide`.

    Returns the scales.
    """
    save_checkpoint(folder, **shape)
    tensors, scales, plain = load_file(folder / SINGLE_FILE), {}, {}
    for name, weight in tensors.items():
        plain[name] = weight
        if "proj" in name:
            rows, columns = (torch.arange(size) // BLOCK for size in weight.shape)
            scale = torch.rand(int(rows[-1]) + 1, int(columns[-1]) + 1) / 1000 + 1e-4
            at_each = scale[rows][:, columns]
            tensors[name] = (weight / at_each).clamp(-448, 448).to(FP8)
            plain[name] = tensors[name].float() * at_each
            scales[f"{name}{SCALES}"] = scale
    save_checkpoint(wide, **shape)
    save_file(plain, wide / SINGLE_FILE)
    save_file(tensors, folder / SINGLE_FILE)
    save_file(scales, folder / "scales.safetensors")
    files = dict.fromkeys(tensors, SINGLE_FILE) | dict.fromkeys(scales, "scales.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": files}))
    change_config(folder, quantization_config=FP8_BLOCKS)
    return scales


EVEN = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
"""parts of two ranks that begin between blocks"""
EVEN_SPARSE = EXPERTS | EVEN | {"moe_intermediate_size": 256, "num_experts": 4}


@pytest.fixture(scope="module", params=[EVEN, EVEN_SPARSE], ids=["dense", "experts"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a checkpoint in blocks, and one of its values."""
    folder = tmp_path_factory.mktemp("saved")
    save_in_blocks(folder / "blocks", folder / "wide", request.param)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "expert_parallel"), diagonal(WHOLE_AND_PARTS, [False, True]))
def test_a_checkpoint_in_blocks_keeps_its_scales(
    saved: Path, tp: TensorParallel, expert_parallel: bool
) -> None:
    found = weights(load_model(saved / "blocks", tp, expert_parallel))
    wide = load_model(saved / "wide", tp, expert_parallel, is_compiled=False)
    for name, weight in weights(wide).items():
        assert isinstance(weight, Tensor)
        other = found[name]
        if "proj" in name:
            assert isinstance(other, Quantized)
            assert other.in_blocks
            other = other.dequantized()
        assert isinstance(other, Tensor)
        torch.testing.assert_close(other, weight, atol=0.0, rtol=1e-6)


def test_the_error_of_8_bits_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    """With scales of rows, numbers of 8 bits are rounded again: √2 times as much."""
    shape = EVEN | {"num_hidden_layers": 1}
    original = save_checkpoint(tmp_path / "original", **shape)
    save_checkpoint(tmp_path / "blocks", **shape)
    quantize_checkpoint_in_blocks(tmp_path / "blocks")
    found = weights(load_model(tmp_path / "blocks"))["model.layers.0.mlp.down_proj"]
    exact = original.state_dict()["model.layers.0.mlp.down_proj.weight"]
    assert isinstance(found, Quantized)
    error = float((found.dequantized() - exact).norm() / exact.norm())
    again = quantize(found.dequantized()).dequantized()
    before = float((again - exact).norm() / exact.norm())
    assert 0.025 < error < 0.028
    assert 1.3 < before / error < 1.5


@SHAPES
def test_parts_within_blocks_are_quantised_anew(tmp_path: Path, shape: dict[str, object]) -> None:
    folder, wide = tmp_path / "blocks", tmp_path / "wide"
    scales = save_in_blocks(folder, wide, shape)
    for tp in WHOLE_AND_PARTS:
        found = load_model(folder, tp)
        for layer in [one for one in found.modules() if isinstance(one, Layer)]:
            if isinstance(layer.weight, Quantized) and layer.weight.in_blocks:  # is not cut
                layer.weight = quantize_each(layer.weight.dequantized())
        assert_same(found, load_model(wide, tp, quantization="fp8"))
    name = min(scales)
    save_file(scales | {name: torch.ones(1, 1)}, folder / "scales.safetensors")
    with pytest.raises(
        ModelError, match=r"got scales of shape \[1, 1\], expected shape \[\d, \d\]"
    ):
        load_model(folder)
    index = json.loads((folder / INDEX_FILE).read_text())
    del index["weight_map"][name]
    (folder / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=f"{name.removesuffix(SCALES)} in .*: got no scales"):
        load_model(folder)


@pytest.mark.slow
def test_the_demo_model_answers_in_8_bits() -> None:
    items = tasks()[:12]
    bits = {"quantization": "fp8", "quantize_lm_head": True}
    options = {"device": "cpu", "num_threads": 1, "kv_cache_gib": 0.1, **bits}
    assert num_right(items, measure(Config(**options), items)) >= 11  # type: ignore[arg-type]
