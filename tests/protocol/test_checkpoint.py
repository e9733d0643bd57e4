"""Facts of a checkpoint, and the sentences that refuse one."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.protocol.checkpoint import (
    GenerationConfig,
    ModelError,
    check_tp,
    eos_token_ids,
    quantized,
    read_generation_config,
    read_model_config,
)
from penstock.protocol.config import Config
from penstock.protocol.sampling import SamplingParams

DEMO = Config().model_folder

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 60,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 100,
}


def changed(folder: Path, **fields: Any) -> Path:
    """The demo model's `config.json` with other fields."""
    config = json.loads((DEMO / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_demo_model() -> None:
    model = read_model_config(DEMO)
    assert (model.head_dim, model.max_position_embeddings) == (64, 4096)
    assert model.num_key_value_heads >= 4
    assert len(eos_token_ids(model, read_generation_config(DEMO))) == 2
    for tp_size in (1, 2, 4, 8):  # of 8, two have the same KV head
        check_tp(model, tp_size)


@pytest.mark.parametrize("tp_size", [3, 16])
def test_heads_that_do_not_divide(tp_size: int) -> None:
    with pytest.raises(ModelError, match=rf"num_.*_heads \d+ does not divide by tp {tp_size}"):
        check_tp(read_model_config(DEMO), tp_size)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM.*Qwen3ForCausalLM is served"),
        ({"rope_scaling": {"rope_type": "yarn"}, "rope_parameters": None}, "yarn"),
        ({"attention_bias": True}, "attention_bias"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({**MOE, "num_experts_per_tok": 61}, "per_tok 61; 1 to 60, the number of experts"),
        ({**MOE, "decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised by .*awq.*128, 128.* is ser"),
    ],
)
def test_what_is_not_served(tmp_path: Path, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        read_model_config(changed(tmp_path, **fields))


def test_what_is_quantised(tmp_path: Path) -> None:
    plain = read_model_config(DEMO)
    assert not quantized(plain, "none").is_fp8
    assert quantized(plain, "fp8").is_fp8
    blocks = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    model = read_model_config(changed(tmp_path, quantization_config=blocks))
    assert quantized(model, "none").is_fp8
    experts = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}
    assert quantized(read_model_config(changed(tmp_path, **experts)), "fp8").is_fp8


def test_experts_are_cut_or_spread(tmp_path: Path) -> None:
    model = read_model_config(changed(tmp_path, **MOE))
    check_tp(model, 4)
    check_tp(model, 4, expert_parallel=True)
    with pytest.raises(ModelError, match="moe_intermediate_size 100 does not divide by tp 8"):
        check_tp(model, 8)
    with pytest.raises(ModelError, match="num_experts 60 does not divide by tp 8"):
        check_tp(model, 8, expert_parallel=True)
    with pytest.raises(ModelError, match="expert_parallel needs a model with experts"):
        check_tp(read_model_config(DEMO), 1, expert_parallel=True)


def test_layers_with_experts(tmp_path: Path) -> None:
    fields = {**MOE, "decoder_sparse_step": 2, "mlp_only_layers": [3], "intermediate_size": 90}
    model = read_model_config(changed(tmp_path, **fields, num_local_experts=9))
    assert [layer for layer in range(6) if model.is_sparse(layer)] == [1, 5]
    assert model.expert_count == 9
    with pytest.raises(ModelError, match="intermediate_size 90 does not divide by tp 4"):
        check_tp(model, 4)
    assert not read_model_config(DEMO).is_sparse(0)


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere does not exist"):
        read_model_config(tmp_path / "nowhere")


def test_defaults_of_a_model_that_samples() -> None:
    sampling = SamplingParams(top_p=0.5)
    GenerationConfig(do_sample=True, temperature=0.6, top_k=20, top_p=0.9).fill(sampling)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, 0.5)
    assert sampling.min_p == 0


def test_a_model_that_does_not_sample_is_greedy_unless_asked() -> None:
    greedy, asked = SamplingParams(), SamplingParams(temperature=1.0)
    for sampling in (greedy, asked):
        GenerationConfig(temperature=0.6, top_k=20).fill(sampling)
    assert (greedy.temperature, asked.temperature, asked.top_k) == (0, 1.0, 0)
