"""Weights of integers: every published format, cut by every rank, dense and in experts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.kernels.matrices import Quantized
from penstock.kernels.packed.matrices import Integers, Packed
from penstock.models import parallel
from penstock.models.model import Model
from penstock.models.parallel import Layer
from penstock.models.tensor_parallel import TensorParallel
from penstock.models.weights import SINGLE_FILE
from penstock.protocol.checkpoint import ModelError
from tests.models.checkpoints import EXPERTS, change_config, check_tensors, save_checkpoint
from tests.models.forward import load_model, prefill_logits, random_prompts
from tests.models.stored_formats import awq, floats, gptq, integers, quantize_checkpoint
from tests.search import diagonal, in_long

pytestmark = pytest.mark.slow

HALF = torch.float16
SHAPE = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1, "head_dim": 32}
"""parts of two ranks that begin within a group of 128 columns"""
SPARSE = EXPERTS | SHAPE | {"num_experts": 4, "moe_intermediate_size": 384, "mlp_only_layers": []}
INTEGERS = {
    "awq": awq(),
    "awq-32": awq(32),
    "gptq": gptq(),
    "gptq-32": gptq(group_size=32),
    "gptq-64-asymmetric": gptq(group_size=64, sym=False),
    "gptq-rows": gptq(group_size=-1),
    "gptq-v2-asymmetric": gptq(sym=False, checkpoint_format="gptq_v2"),
    "gptq-8": gptq(8),
    "gptq-8-asymmetric": gptq(8, 64, sym=False),
    "gptq-act-order": gptq(desc_act=True),
    "gptq-8-act-order": gptq(8, 32, desc_act=True, sym=False),
    "w4a16": integers(4, 128),
    "w4a16-asymmetric": integers(4, 64, symmetric=False),
    "w4a16-rows": integers(4, 0),
    "w8a16": integers(8, 128),
    "w8a8": integers(8, 0, form="int-quantized"),
}
QUICK = ("awq", "gptq-v2-asymmetric", "gptq-8-act-order", "w4a16-asymmetric", "w8a8")
"""each branch of the loader; the others are for `make test-long`"""
FLOATS = {f"fp8-{name}": floats(name) for name in ("tensor", "channel", "block")}
RANKS = {
    "whole": TensorParallel(),
    "first": TensorParallel(0, 2),
    "second": TensorParallel(1, 2),
}


def write(
    folder: Path, quantization: dict[str, Any], shape: dict[str, Any], keep: str = "$^"
) -> tuple[Path, Path]:
    """Write a quantized checkpoint, and one of the same numbers in float32."""
    narrow, wide = folder / "narrow", folder / "wide"
    save_checkpoint(narrow, **shape)
    save_checkpoint(wide, **shape)
    dense = quantize_checkpoint(narrow, quantization, keep)
    assert dense
    numbers = {name: one.float().contiguous() for name, one in dense.items()}
    save_file(load_file(wide / SINGLE_FILE) | numbers, wide / SINGLE_FILE)
    return narrow, wide


def weights(model: Model) -> dict[str, Any]:
    """Return the weight of every layer."""
    return {name: one.weight for name, one in model.named_modules() if isinstance(one, Layer)}


def assert_equal(found: Model, wanted: Model, scale_type: torch.dtype = HALF) -> set[type]:
    """Compare every bit of all weights; return the types of those found.

    scale_type: of the checkpoint's scales; the published numbers are rounded to it.
    """
    of_found = weights(found)
    for name, weight in weights(wanted).items():
        other = of_found[name]
        numbers = other if isinstance(other, Tensor) else other.dequantized()
        if isinstance(other, Packed | Integers):
            numbers = numbers.to(scale_type)
        assert torch.equal(numbers.float(), weight), name
    return {type(weight) for weight in of_found.values()}


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep weights packed on a CPU, as on a GPU."""
    monkeypatch.setattr(parallel, "stays_packed", lambda: True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, SHAPE) if name in QUICK else in_long(name, SHAPE) for name in INTEGERS),
        *(in_long(name, SPARSE) for name in ("awq", "w4a16-asymmetric", "w8a8")),
        ("gptq-act-order", SPARSE),
    ],
)
def test_bits_are_those_of_the_published_definition(
    tmp_path: Path, name: str, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dequantized, in the layout of CPUs where that is possible, and in that of GPUs."""
    quantization = INTEGERS[name]
    scale_type = HALF if "bits" in quantization else torch.bfloat16
    narrow, wide = write(tmp_path, quantization, shape)
    for tp in RANKS.values():
        wanted = load_model(wide, tp, is_compiled=False)
        assert Packed not in assert_equal(load_model(narrow, tp, is_compiled=False), wanted)
        found = load_model(narrow, tp, is_compiled=False, keeps_integers=True)
        has_order = quantization.get("desc_act", False)
        assert (Integers in assert_equal(found, wanted, scale_type)) != has_order
        with monkeypatch.context() as changed:
            changed.setattr(parallel, "stays_packed", lambda: True)
            found = load_model(narrow, tp, is_compiled=False)
        assert Packed in assert_equal(found, wanted, scale_type)
        weight = found.model.layers[0].self_attn.qkv_proj.weight
        assert isinstance(weight, Packed)
        assert weight.bits == quantization.get("bits", weight.bits)
        down = found.model.layers[0].mlp.down_proj.weight
        assert isinstance(down, Packed) != (tp.size > 1 and has_order)


@pytest.mark.parametrize("quantization", [in_long(awq()), gptq(desc_act=True)], ids=str)
@pytest.mark.usefixtures("packed")
def test_whole_experts_of_a_rank(tmp_path: Path, quantization: dict[str, Any]) -> None:
    narrow, wide = write(tmp_path, quantization, SPARSE)
    for rank in range(2):
        found, wanted = (
            load_model(folder, TensorParallel(rank, 2), expert_parallel=True, is_compiled=False)
            for folder in (narrow, wide)
        )
        assert Packed in assert_equal(found, wanted)


@pytest.mark.parametrize(
    ("quantization", "shape"), diagonal([awq(), gptq(8, desc_act=True)], [SHAPE, SPARSE])
)
@pytest.mark.usefixtures("packed")
@torch.inference_mode()
def test_logits_of_packed_weights(
    tmp_path: Path, quantization: dict[str, Any], shape: dict[str, Any]
) -> None:
    narrow, wide = write(tmp_path, quantization, shape)
    prompts = random_prompts(264, 1, 30)
    models = [load_model(one, is_compiled=False) for one in (narrow, wide)]
    numbers = weights(models[1])
    for name, weight in weights(models[0]).items():
        if isinstance(weight, Packed):  # whose products take numbers that are not rounded
            numbers[name].copy_(weight.dequantized())
    found, wanted = (prefill_logits(model, prompts) for model in models)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize(("quantization", "tp"), diagonal(FLOATS.values(), RANKS.values()))
def test_e4m3_of_compressed_tensors(
    tmp_path: Path, quantization: dict[str, Any], tp: TensorParallel
) -> None:
    shape = SHAPE | {"intermediate_size": 512, "head_dim": 64}  # whole blocks for each rank
    narrow, wide = write(tmp_path, quantization, shape)
    found = load_model(narrow, tp)
    assert Quantized in assert_equal(found, load_model(wide, tp, is_compiled=False))


def test_modelopt_has_a_scale_for_each_weight(tmp_path: Path) -> None:
    """Return modelopt's format; static scales of activations and of the KV cache are not used."""
    narrow, wide = write(tmp_path, floats("tensor"), SHAPE)
    modelopt = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    change_config(narrow, quantization_config=modelopt)
    tensors = load_file(narrow / SINGLE_FILE)
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        tensors[name] = tensors[name].reshape(())
        tensors[name.replace("weight_scale", "input_scale")] = torch.ones(())
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(())
    save_file(tensors, narrow / SINGLE_FILE)
    assert_equal(load_model(narrow), load_model(wide, is_compiled=False))


@pytest.mark.parametrize(
    ("quantization", "keep"),
    [
        (awq(modules_to_not_convert=["o_proj", "layers.0.mlp"]), r"o_proj|layers\.0\.mlp"),
        (gptq(dynamic={"-:.*v_proj": {}}), "v_proj"),
        (gptq(modules_in_block_to_quantize=[["mlp.gate_proj", "mlp.up_proj"]]), "attn|down"),
        (integers(4, 128) | {"ignore": ["re:.*self_attn.*", "lm_head"]}, "self_attn"),
    ],
    ids=["awq", "gptq", "gptq-blocks", "compressed"],
)
@pytest.mark.usefixtures("packed")
def test_layers_that_are_not_quantized(
    tmp_path: Path, quantization: dict[str, Any], keep: str
) -> None:
    """Layers that share a product with one in 16 bits are dequantized."""
    narrow, wide = write(tmp_path, quantization, SHAPE | {"num_hidden_layers": 2}, keep)
    found = load_model(narrow, is_compiled=False)
    scale_type = HALF if "bits" in quantization else torch.bfloat16
    assert Packed in assert_equal(found, load_model(wide, is_compiled=False), scale_type)


QKV = "model.layers.0.self_attn"


@pytest.mark.parametrize(
    ("quantization", "change", "sentence"),
    [
        (awq(), {".qweight": torch.zeros(256, 31).int()}, r"q_proj.qweight in .*: got shape \["),
        (awq(), {".scales": None}, "the checkpoint lacks .*q_proj.scales"),
        (awq(), {".scales": torch.zeros(2, 256).int()}, "q_proj.scales: got I32, expected one of"),
        (gptq(), {".g_idx": torch.arange(256).int() % 2}, "g_idx with columns of a group that are"),
        (gptq(), {".g_idx": torch.arange(256).int()}, "got groups 0 to 255, expected 0 to 1"),
        (gptq(desc_act=True), {".g_idx": torch.arange(256).int() // 128}, "k_proj.*same input"),
        (awq(), {".qweight": None, ".weight": torch.ones(256, 256)}, "expected packed integers"),
    ],
)
@pytest.mark.usefixtures("packed")
def test_refuses_tensors_that_do_not_fit(
    tmp_path: Path, quantization: dict[str, Any], change: dict[str, Tensor | None], sentence: str
) -> None:
    narrow, _ = write(tmp_path, quantization, SHAPE)
    named = {f"{QKV}.q_proj{end}": tensor for end, tensor in change.items()}
    tensors = load_file(narrow / SINGLE_FILE) | named
    save_file({name: one for name, one in tensors.items() if one is not None}, narrow / SINGLE_FILE)
    with pytest.raises(ModelError, match=sentence):
        load_model(narrow, is_compiled=False)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_head_of_integers_is_dequantized(tmp_path: Path, bits: int) -> None:
    narrow, wide = write(tmp_path, gptq(bits, lm_head=True), SHAPE)
    check_tensors(narrow)
    found, wanted = load_model(narrow, keeps_integers=True), load_model(wide, is_compiled=False)
    assert torch.equal(found.head.weight.float(), wanted.head.weight)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_biases_of_a_packed_checkpoint_are_zeros(tmp_path: Path, value: float) -> None:
    """AutoGPTQ wrote one for each layer."""
    narrow, wide = write(tmp_path, gptq(), SHAPE)
    tensors = load_file(narrow / SINGLE_FILE)
    modules = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    bias = {f"{name}.bias": torch.full((4,), value) for name in modules}
    save_file(tensors | bias, narrow / SINGLE_FILE)
    check_tensors(narrow)
    if not value:
        assert_equal(load_model(narrow, is_compiled=False), load_model(wide, is_compiled=False))
        return
    with pytest.raises(ModelError, match=r"q_proj\.bias: got numbers other"):
        load_model(narrow, is_compiled=False)


def test_integers_without_their_format(tmp_path: Path) -> None:
    narrow, _ = write(tmp_path, awq(), SHAPE)
    change_config(narrow, quantization_config=None)
    with pytest.raises(ModelError, match="got packed integers, expected their format in quantiz"):
        load_model(narrow)
    with pytest.raises(ModelError, match=r"got I32, .*; integers need `quantization_config`"):
        check_tensors(narrow)
