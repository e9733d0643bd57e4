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
    read_generation_config,
    read_model_config,
)
from penstock.protocol.config import Config
from penstock.protocol.sampling import SamplingParams

DEMO = Config().model_folder


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
    for tp_size in (1, 2, 4):
        check_tp(model, tp_size)


@pytest.mark.parametrize("tp_size", [3, 8])
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
    ],
)
def test_what_is_not_served(tmp_path: Path, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        read_model_config(changed(tmp_path, **fields))


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
