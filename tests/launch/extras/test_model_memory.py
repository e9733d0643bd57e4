"""Estimates of memory, against the parameters of models in the published shapes."""

import msgspec
import pytest
import torch

from penstock.kernels.attention.backends import TorchAttention
from penstock.kernels.cpu.types import MATRICES
from penstock.kernels.matrices import FP8
from penstock.launch.extras.models import Layout, needs, weight_bytes
from penstock.models import parallel
from penstock.models.architecture import describe
from penstock.models.compiled import CompiledDecoder
from penstock.models.layers import Setup, SharedExpert
from penstock.models.model import Model
from penstock.models.parallel import dequantize, with_integers
from penstock.models.tensor_parallel import TensorParallel
from penstock.models.weights import load_weights
from penstock.protocol.checkpoint import (
    ModelConfig,
    ModelError,
    quantized,
    read_model_config,
    text_fields,
)
from penstock.protocol.config import Config
from penstock.services.worker.memory.kv_cache import KVLayout
from penstock.services.worker.memory.state_memory import StateLayout
from tests.models.published import AWQ, COMPRESSED, GPTQ, PUBLISHED

DEFAULTS = Config()
DEMO = DEFAULTS.model_folder
SERVED = [
    *("Qwen3-0.6B", "Qwen3-4B", "Qwen3-8B-FP8", "Qwen3-14B", "Qwen3-32B-FP8"),
    *("Qwen3-4B-AWQ", "Qwen3-1.7B-GPTQ-Int8", "(compressed-tensors, pack-quantized W4A16)"),
    *("Qwen3-30B-A3B", "Qwen3-30B-A3B-FP8", "Qwen3-30B-A3B-GPTQ-Int4", "Qwen3-235B-A22B-FP8"),
    "Qwen3-Coder-480B-A35B-Instruct",
]


HYBRIDS = ["Qwen3.8-27B", "Qwen3.8-27B-FP8", "Qwen3.6-35B-A3B", "Qwen3-Coder-Next"]
GROUP = {"targets": ["Linear"], "weights": COMPRESSED["pack-quantized W4A16"]}
PARTLY = {
    # formats of a hybrid model in which some modules keep 16 bits
    "AWQ": AWQ | {"modules_to_not_convert": ["linear_attn", "layers.0.mlp"]},
    "GPTQ": GPTQ | {"dynamic": {"-:.*linear_attn.*": {}, r"-:.*layers\.3\..*": {}}},
    "GPTQ in any order": GPTQ | {"desc_act": True},
    "GPTQ of some": GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["up_proj"]]},
    "compressed": {
        "config_groups": {"group_0": GROUP},
        "format": "pack-quantized",
        "ignore": ["re:.*linear_attn.*", "model.language_model.layers.1.mlp.down_proj"],
        "quant_method": "compressed-tensors",
    },
    "modelopt": {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "exclude_modules": ["*linear_attn*", "*.layers.2.mlp*"],
    },
    "FP8": {"quant_method": "fp8", "modules_to_not_convert": ["linear_attn"]},
}


def published(name: str) -> ModelConfig:
    """Return a configuration as it is read from `config.json`."""
    fields = text_fields(PUBLISHED[name].config)
    given = {key: value for key, value in fields.items() if value is not None}
    return msgspec.convert(given, ModelConfig)


def parameter_bytes(config: ModelConfig, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the bytes of the parameters that a rank's worker makes."""
    monkeypatch.setattr(parallel, "stays_packed", lambda: layout.on_gpus)
    group = TensorParallel(0, layout.tp, torch.device("cuda" if layout.on_gpus else "cpu"))
    attention = TorchAttention(16, config.head_dim**-0.5)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if layout.on_gpus else torch.float32)
    try:
        with torch.device("meta"), with_integers():
            model = Model(Setup(config, group, attention), 16, layout.quantize_lm_head)
            for module in model.modules():
                if isinstance(module, SharedExpert) and not layout.on_gpus:
                    dequantize(module)  # it stays in torch
    finally:
        torch.set_default_dtype(before)
    return sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize(
    "layout",
    [
        *(Layout(), Layout(tp=2), Layout(tp=8), Layout(quantize_lm_head=True)),
        *(Layout(on_gpus=False), Layout(tp=4, on_gpus=False)),
    ],
    ids=str,
)
@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_weights_are_the_parameters(
    name: str, layout: Layout, quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = published(name)
    if quantization == "fp8" and not (config.fp8 or config.weight_format is None):
        with pytest.raises(ModelError, match="quantization: got fp8, expected none for weights in"):
            quantized(config, quantization)
        return
    config = quantized(config, quantization)
    config = msgspec.structs.replace(config, num_hidden_layers=2)
    parameters = parameter_bytes(config, layout, monkeypatch)
    error = 0.06 if config.is_packed and config.expert_count else 0.02
    assert weight_bytes(config, layout) == pytest.approx(parameters, rel=error)


@pytest.mark.parametrize("name", [*HYBRIDS, *PARTLY])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(on_gpus=False)], ids=str)
def test_weights_of_hybrid_models_are_the_parameters(
    name: str, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = published(name if name in HYBRIDS else "Qwen3.8-27B")
    changed = {"quantization_config": PARTLY[name]} if name in PARTLY else {}
    kinds = config.kinds_of_layers[:4]
    config = msgspec.structs.replace(config, num_hidden_layers=4, layer_types=kinds, **changed)
    parameters = parameter_bytes(config, layout, monkeypatch)
    assert weight_bytes(config, layout) == pytest.approx(parameters, rel=0.02)


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize(("tp", "is_fp8"), [(1, False), (2, True), (8, False)])
def test_the_kv_cache_is_the_workers(name: str, tp: int, is_fp8: bool) -> None:
    config = published(name)
    need = needs(config, Layout(tp=tp, fp8_kv_cache=is_fp8))
    layout = KVLayout(describe(config), tp, 16, FP8 if is_fp8 else torch.bfloat16)
    num_bytes = need.kv_per_token * 16 * 1000
    assert layout.num_fitting_blocks(num_bytes) == 1000
    assert layout.num_fitting_blocks(num_bytes - 1) == 999


@pytest.mark.parametrize("name", ["Qwen3.8-27B", "Qwen3.5-4B"])
@pytest.mark.parametrize(("tp", "gibibytes"), [(1, 80), (2, 30), (1, 1000)])
def test_the_state_blocks_are_the_workers(name: str, tp: int, gibibytes: int) -> None:
    config = published(name)
    need = needs(config, Layout(tp=tp))
    left = gibibytes * 2**30
    layout = KVLayout(describe(config), tp, 128, torch.bfloat16)
    states = StateLayout(layout, DEFAULTS.max_num_seqs, is_shared=True)
    assert need.state == states.blocks_per_state * layout.block_bytes
    tokens = (states.num_fitting_blocks(left) - 2 * states.blocks_per_state) * 128
    assert need.num_tokens(left + need.weights + need.step) == pytest.approx(tokens, rel=0.02)


def test_what_fits() -> None:
    need = needs(published("Qwen3-8B"), Layout())
    assert 15.2 < need.weights / 2**30 < 15.3  # 8.19 billion in bfloat16
    assert need.kv_per_token == 2 * 36 * 8 * 128 * 2
    full = need.with_context(1000)
    assert need.num_tokens(full) == 1000
    assert need.num_tokens(full - 1) == 999
    assert need.num_tokens(need.weights) == 0


@pytest.mark.parametrize(
    ("bits", "quantize_lm_head"),
    [
        (8, False),
        (4, True),
        *(pytest.param(*one, marks=pytest.mark.long) for one in ((8, True), (4, False))),
    ],
)
def test_integers_are_the_compiled_ones(bits: int, quantize_lm_head: bool) -> None:
    config = read_model_config(DEMO)
    layout = Layout(on_gpus=False, integer_bits=bits, quantize_lm_head=quantize_lm_head)
    attention = TorchAttention(16, config.head_dim**-0.5)
    model = Model(Setup(config, TensorParallel(0, 1, torch.device("cpu")), attention), 16)
    load_weights(model, DEMO, lambda: None)
    start = sum(4 * one.numel() for one in model.parameters())
    compiled = CompiledDecoder(model, config, bits, quantize_lm_head)
    matrices = [getattr(one, name) for one in compiled._compiled._layers for name in MATRICES]
    if quantize_lm_head:
        matrices.append(compiled._head)
    parts = (part for one in matrices for part in (one.codes, one.scale))
    tensors = [*model.parameters(), *parts]
    num_bytes = sum(one.nbytes for one in tensors)
    assert weight_bytes(config, layout) == pytest.approx(num_bytes, rel=0.02)
    need = needs(config, layout)
    assert need.start > start
    assert need.num_tokens(need.start - 1) == 0 < need.num_tokens(need.with_context(1))
    assert need.with_context(0) >= need.start
