"""Facts of a checkpoint, and the sentences that refuse one."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.protocol.checkpoint import ModelError, read_model_config
from penstock.protocol.config import Config
from penstock.protocol.messages.sampling import SamplingParams
from penstock.protocol.quantization import FP8_BLOCKS
from penstock.protocol.tokenizer_file import GenerationConfig, read_eos_token_ids
from tests.models.checkpoints import MODULES, write_embedding_files

DEMO = Config().model_folder

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 60,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 100,
}


def changed(folder: Path, **fields: Any) -> Path:
    """Return the demo model's `config.json` with other fields."""
    config = json.loads((DEMO / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_demo_model() -> None:
    model = read_model_config(DEMO)
    assert (model.head_dim, model.max_position_embeddings) == (64, 4096)
    assert model.num_key_value_heads >= 4
    assert read_eos_token_ids(DEMO) == [258, 256]


def scaling(**fields: Any) -> dict[str, Any]:
    return {"rope_scaling": fields}


def parameters(**fields: Any) -> dict[str, Any]:
    return {"rope_parameters": fields}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"got \['LlamaF.*'\], expected Qwen3ForCausalLM"),
        (
            {"architectures": None, "model_type": "qwen4_exp"},
            "got None, expected .*; Qwen4, .* is not served yet",
        ),
        ({"architectures": ["Qwen3_5Model"]}, "; a classifier, or"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "; a classifier, or"),
        ({"architectures": ["Qwen3Model"]}, "an embedding model without modules.json"),
        ({"hidden_size": None}, "hidden_size: got null, expected a value"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"hidden_act": None}, 'hidden_act: got null, expected "silu"'),
        ({"hidden_act": "gelu"}, 'hidden_act: got "gelu", expected "silu"'),
        ({"torch_dtype": "int3"}, "torch_dtype: got 'int3', expected 'auto' or 'bfloat16' or"),
        ({"dtype": "int3"}, "dtype: got 'int3', expected 'auto' or 'bfloat16' or 'float16' or"),
        ({"rope_theta": 1.0}, "rope_theta: got 1.0, expected 2 to "),
        ({"rope_theta": 0}, "rope_theta: got 0.0, expected 2 to "),
        ({"rope_theta": -1.0}, "rope_theta: got -1.0, expected a number of 2 to "),
        (
            scaling(type="dynamic", factor=2.0),
            "type: got 'dynamic', expected 'default' or 'yarn'",
        ),
        (scaling(type="linear") | parameters(rope_theta=1e6), "rope_scaling.type: got 'linear'"),
        (parameters(full_attention={"rope_type": "a"}), "rope_parameters.rope_type: got 'a'"),
        (
            scaling(type="linear") | parameters(rope_type="yarn"),
            r"rope_parameters.rope_type and rope_scaling.type: got \['linear', 'yarn'\], exp",
        ),
        (parameters(partial_rotary_factor=0.5), "rope_parameters.partial_rotary_factor: got 0.5"),
        (scaling(type="yarn"), "rope_scaling.factor: got null, expected 1 or more"),
        (parameters(type="yarn"), "rope_parameters.factor: got null, exp"),
        (scaling(type="yarn", factor="4"), "rope_scaling.factor: got '4', expected a number"),
        (scaling(type="yarn", factor=0.5), "rope_scaling.factor: got 0.5, expected 1 to "),
        (scaling(type="yarn", factor=0), "rope_scaling.factor: got 0, expected 1 to "),
        ({"head_dim": 63}, "head_dim: got 63, expected `int` that's a multiple of 2"),
        ({"attention_bias": True}, "attention_bias: got true, expected false"),
        ({"use_sliding_window": True}, "use_sliding_window: got true, expected false"),
        (
            {"layer_types": ["full_attention", "linear"]},
            'layer_types: got "linear", expected',
        ),
        ({"dual_chunk_attention_config": {"a": 8}}, 'config: got {"a":8}, expected null'),
        ({**MOE, "num_experts_per_tok": 61}, "per_tok: got 61, expected 1 to 60, the number of"),
        ({**MOE, "decoder_sparse_step": 0}, "decoder_sparse_step"),
        (
            {"quantization_config": {"quant_method": "bnb"}},
            "got bnb weights, expected 16 bits",
        ),
    ],
)
def test_what_is_not_served(tmp_path: Path, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        read_model_config(changed(tmp_path, **fields))


@pytest.mark.parametrize(
    ("fields", "base", "yarn"),
    [
        ({}, 1e5, None),
        ({"rope_theta": None}, 1e4, None),
        ({"rope_theta": None} | parameters(rope_theta=5e6), 5e6, None),
        (scaling(type="default"), 1e5, None),
        (scaling(type="yarn", factor=4), 1e5, (4, 4096)),
        (scaling(rope_type="yarn", factor=2.5), 1e5, (2.5, 4096)),
        (
            scaling(rope_type="yarn", original_max_position_embeddings=1024)
            | parameters(rope_type="default", rope_theta=1e6),
            1e6,
            (4, 1024),
        ),
        (parameters(rope_type="yarn", factor=8.0), 1e5, (8, 4096)),
        (parameters(full_attention={"rope_type": "yarn", "factor": 2}), 1e5, (2, 4096)),
        (
            scaling(type="yarn", factor=4) | {"original_max_position_embeddings": 2048},
            1e5,
            (4, 2048),
        ),
    ],
)
def test_rope_in_old_and_new_fields(
    tmp_path: Path, fields: dict[str, Any], base: float, yarn: tuple[float, int] | None
) -> None:
    model = read_model_config(changed(tmp_path, **fields))
    assert model.rope.base == base
    assert (model.rope.yarn and model.rope.yarn[:2]) == yarn
    longest = 4096 if yarn is None else int(yarn[0] * yarn[1])
    assert (model.context(0), model.context(100)) == (longest, 100)
    with pytest.raises(ModelError, match=f"max_model_len: got 40000, expected at most {longest}"):
        model.context(40000)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [("head_dim", 16, 16), ("head_dim", None, 32), ("rms_norm_eps", None, 1e-6)],
)
def test_null_is_the_default(tmp_path: Path, field: str, value: object, expected: float) -> None:
    assert getattr(read_model_config(changed(tmp_path, **{field: value})), field) == expected
    assert read_model_config(changed(tmp_path, num_key_value_heads=None)).num_key_value_heads == 8


def test_head_dim_that_is_missing(tmp_path: Path) -> None:
    config = json.loads((DEMO / "config.json").read_text())
    del config["head_dim"]
    for fields, head_dim in (({}, 128), (MOE, 32)):
        (tmp_path / "config.json").write_text(json.dumps(config | fields))
        assert read_model_config(tmp_path).head_dim == head_dim


@pytest.mark.parametrize("name", ["Qwen3ForCausalLM", "Qwen3Model"])
def test_an_embedding_model_is_known_by_its_pooling(tmp_path: Path, name: str) -> None:
    write_embedding_files(changed(tmp_path, architectures=[name], tie_word_embeddings=False))
    model = read_model_config(tmp_path)
    assert (model.is_embedding_model, model.tie_word_embeddings) == (True, True)
    new = {"embedding_dimension": 128, "pooling_mode": "lasttoken"}
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps(new))
    assert read_model_config(tmp_path).is_embedding_model
    (tmp_path / "modules.json").write_text(json.dumps(MODULES[:1]))
    changed(tmp_path, is_embedding_model=True)
    assert not read_model_config(tmp_path).is_embedding_model


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("modules.json", [*MODULES, {"type": "a.Dense"}], "got Dense, expected one of Normalize"),
        ("modules.json", "[", r"modules.json can't be read"),
        ("modules.json", [{"type": "a.Pooling", "path": "2_Other"}], "2_Other/config.json is miss"),
        ("modules.json", [{"type": "a.Pooling", "path": ""}], "config.json is missing"),
        ("1_Pooling/config.json", {"pooling_mode": "mean"}, r"\['pooling_mode'\], expected a pool"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": True}, "got .*mean_tokens"),
        ("1_Pooling/config.json", {}, r"got \[\], expected a pooling of the last token"),
    ],
)
def test_embedding_models_that_are_not_served(
    tmp_path: Path, file: str, content: object, sentence: str
) -> None:
    write_embedding_files(changed(tmp_path))
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / file).write_text(text)
    with pytest.raises(ModelError, match=sentence):
        read_model_config(tmp_path)


@pytest.mark.parametrize("token", ["<|answer|>", {"content": "<|answer|>"}, "\u0121"])
def test_eos_of_the_tokenizer_is_added(tmp_path: Path, token: object) -> None:
    changed(tmp_path)
    for name in ("tokenizer.json", "generation_config.json"):
        (tmp_path / name).write_bytes((DEMO / name).read_bytes())
    assert read_eos_token_ids(tmp_path) == [258, 256]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    vocab = json.loads((DEMO / "tokenizer.json").read_text())["model"]["vocab"]
    assert read_eos_token_ids(tmp_path) == [258, 256, vocab.get(str(token), 261)]
    (tmp_path / "generation_config.json").unlink()
    assert read_eos_token_ids(tmp_path)[0] == 258  # of config.json
    assert len(read_eos_token_ids(tmp_path)) == 2


def test_what_is_quantised(tmp_path: Path) -> None:
    assert not read_model_config(DEMO).fp8
    assert read_model_config(DEMO, "fp8").fp8
    blocks = FP8_BLOCKS | {"activation_scheme": "dynamic"}
    assert read_model_config(changed(tmp_path, quantization_config=blocks)).fp8
    experts = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}
    assert read_model_config(changed(tmp_path, **experts), "fp8").fp8


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere does not exist"):
        read_model_config(tmp_path / "nowhere")


def test_defaults_of_a_model_that_samples() -> None:
    sampling = SamplingParams(top_p=0.5)
    GenerationConfig(do_sample=True, temperature=0.6, top_k=20, top_p=0.9).fill(sampling)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, 0.5)
    assert (sampling.min_p, sampling.presence_penalty) == (0, 0)
    penalised, own = SamplingParams(), SamplingParams(presence_penalty=0.0)
    for one in (penalised, own):
        GenerationConfig(do_sample=True, presence_penalty=1.5, top_k=20).fill(one)
    assert (penalised.presence_penalty, own.presence_penalty, own.temperature) == (1.5, 0, 1)


def test_a_model_that_does_not_sample_is_greedy_unless_asked() -> None:
    greedy, asked = SamplingParams(), SamplingParams(temperature=1.0)
    for sampling in (greedy, asked):
        GenerationConfig(temperature=0.6, top_k=20).fill(sampling)
    assert (greedy.temperature, asked.temperature, asked.top_k) == (0, 1.0, 0)


@pytest.mark.parametrize(
    ("eos_token_id", "expected", "warning"),
    [
        (None, [], "no eos_token_id in the vocabulary"),
        ([256, 99_999], [256], "eos_token_id: got 99999, expected 0 to 263"),
        (-1, [], "eos_token_id: got -1, expected 0 to 263"),
        ([258, 256], [258, 256], ""),
    ],
)
def test_eos_that_no_token_can_be(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    eos_token_id: object,
    expected: list[int],
    warning: str,
) -> None:
    assert read_eos_token_ids(changed(tmp_path, eos_token_id=eos_token_id)) == expected
    assert warning in caplog.text
    assert bool(caplog.text) == bool(warning)
