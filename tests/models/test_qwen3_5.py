"""The logits of transformers' Qwen3_5ForCausalLM, from the same checkpoint, in float32."""

import logging
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from penstock.models import qwen3_5
from penstock.models.weights import load_weights
from penstock.protocol.checkpoint import ModelError, read_model_config
from tests.models.checkpoints import change_config, check_tensors
from tests.models.forward import load_model, prefill_logits, random_prompts
from tests.models.hybrid import EXPERTS, SIZES, SMALL, Steps, rope_of, save_hybrid, shape_of
from tests.search import in_long

TOLERANCE = {"atol": 1e-4, "rtol": 0.0}


@torch.inference_mode()
def transformers_logits(model: PreTrainedModel, prompts: list[list[int]]) -> Tensor:
    """Return the logits after every token of the prompts, each prompt on its own."""
    return torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in prompts])


@pytest.mark.parametrize("length", [65, 1000, in_long(10_000)])
@pytest.mark.parametrize("size", SIZES)
def test_logits_are_those_of_transformers(tmp_path: Path, size: str, length: int) -> None:
    """In float32. Over 10,000 tokens errors add up: the reference is transformers in float64.

    Its experts have no float64. Tokens have all of them then, or rounding would choose others where
    two are nearly as likely.
    """
    shape, is_long = shape_of(size), length > 1000
    is_exact = is_long and "num_experts" not in shape
    if is_long and not is_exact:
        shape |= {"num_experts_per_tok": shape["num_experts"]}
    reference = save_hybrid(tmp_path, **shape)
    check_tensors(tmp_path)
    prompts = random_prompts(264, *((1, 63, 64, 65) if length == 65 else (length,)))
    expected = transformers_logits(reference.double() if is_exact else reference, prompts).float()
    for is_compiled in (True, False):
        logits = prefill_logits(load_model(tmp_path, is_compiled=is_compiled), prompts)
        assert logits is not None
        limit = 2e-4 if is_exact else TOLERANCE["atol"]
        torch.testing.assert_close(logits, expected, atol=limit, rtol=0.0)


@pytest.mark.parametrize("size", ["9B", "Next-80B-A3B"])
def test_gates_are_computed_with_queries_keys_and_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    """Join the weights, as on a GPU, from separate tensors and from an interleaved tensor."""
    reference = save_hybrid(tmp_path, **shape_of(size))
    prompts = random_prompts(264, 1, 65)
    monkeypatch.setattr(qwen3_5, "joins_gates", lambda *_: True)
    model = load_model(tmp_path, is_compiled=False)
    assert not any("ba_proj" in name for name, _ in model.named_parameters())
    logits = prefill_logits(model, prompts)
    assert logits is not None
    torch.testing.assert_close(logits, transformers_logits(reference, prompts), **TOLERANCE)


@pytest.mark.parametrize("size", ["9B", "35B-A3B", "Next-80B-A3B"])
def test_logits_beyond_the_original_length(tmp_path: Path, size: str) -> None:
    """YaRN as published for more than 262,144 tokens, on the part of a head that RoPE rotates."""
    shape = {**shape_of(size), "max_position_embeddings": 64}
    yarn = rope_of(shape) | {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    reference = save_hybrid(tmp_path, size != "Next-80B-A3B", **shape, rope_parameters=yarn)
    rope = read_model_config(tmp_path).rope
    assert (rope.num_positions, rope.share) == (256, 0.25)
    prompts = random_prompts(264, 64, 65, 256)
    logits = prefill_logits(load_model(tmp_path), prompts)
    assert logits is not None
    torch.testing.assert_close(logits, transformers_logits(reference, prompts), **TOLERANCE)


@pytest.mark.parametrize("num_prompt", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("is_compiled", [True, False])
def test_logits_of_decoding(tmp_path: Path, is_compiled: bool, num_prompt: int) -> None:
    reference = save_hybrid(tmp_path, initializer_range=0.08)
    (token_ids,) = random_prompts(264, num_prompt + 20)
    expected = transformers_logits(reference, [token_ids])
    steps = Steps(load_model(tmp_path, is_compiled=is_compiled))
    logits = [steps.prefill(token_ids[:num_prompt])]
    logits += [steps.decode([token_id], 1) for token_id in token_ids[num_prompt:]]
    torch.testing.assert_close(torch.cat(logits), expected, **TOLERANCE)


@pytest.mark.parametrize("is_compiled", [True, False])
def test_one_order_of_arithmetic(tmp_path: Path, is_compiled: bool) -> None:
    """Bits depend neither on chunks and drafts, nor on whether a token is computed again."""
    save_hybrid(tmp_path)
    model, random = load_model(tmp_path, is_compiled=is_compiled), Random(0)
    (token_ids,) = random_prompts(264, 300)
    prompt, sampled = token_ids[:150], token_ids[150:]
    plain = Steps(model)
    expected = plain.prefill(prompt)
    decoded = torch.cat([plain.decode([token_id], 1) for token_id in sampled])
    chunked = Steps(model)
    for begin, end in ((0, 64), (64, 128), (128, 150)):
        assert torch.equal(chunked.prefill(prompt[begin:end]), expected[begin:end])
    place = 0
    while place < len(sampled) - 40:  # with drafts
        right, wrong = random.randrange(1, 5), random.randrange(3)
        tokens = [*sampled[place : place + right], *[7] * wrong]
        logits = chunked.decode(tokens, right)
        assert torch.equal(logits[:right], decoded[place : place + right])
        place += right
    # after a failure the window's tokens are added first; later tokens are prefilled
    assert torch.equal(chunked.prefill(sampled[place:], 150), decoded[place:])
    again = Steps(model)
    again.prefill(token_ids[:64], 150)
    assert torch.equal(again.prefill(token_ids[64:192], 150)[:86], expected[64:])
    assert torch.equal(again.prefill(token_ids[192:], 150), decoded[42:])


@pytest.mark.parametrize("size", ["9B", "35B-A3B"])
def test_a_multimodal_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size: str
) -> None:
    reference = save_hybrid(tmp_path, is_multimodal=True, **shape_of(size))
    check_tensors(tmp_path)
    model, prompts = load_model(tmp_path), random_prompts(264, 1, 80)
    logits = prefill_logits(model, prompts)
    assert logits is not None
    torch.testing.assert_close(logits, transformers_logits(reference, prompts), **TOLERANCE)
    with caplog.at_level(logging.INFO):
        load_weights(model, tmp_path, lambda: None, log_files=True)
    assert any("model.visual.* are not read" in message for message in caplog.messages)


def test_experts_in_one_tensor_and_in_many(tmp_path: Path) -> None:
    """Transformers stores either, depending on the architecture."""
    state = save_hybrid(tmp_path, **EXPERTS).state_dict()
    fused = {name: tensor for name, tensor in state.items() if ".experts." in name}
    single = {}
    for name, tensor in fused.items():
        module, _, end = name.rpartition(".")
        names = ("gate_proj", "up_proj") if end == "gate_up_proj" else ("down_proj",)
        for expert, matrix in enumerate(tensor):
            for part, values in zip(names, matrix.chunk(len(names)), strict=True):
                single[f"{module}.{expert}.{part}.weight"] = values
    path = tmp_path / "model.safetensors"
    others = {name: tensor for name, tensor in load_file(path).items() if ".experts." not in name}
    logits = []
    for experts in (fused, single):
        save_file(others | {name: tensor.clone() for name, tensor in experts.items()}, path)
        check_tensors(tmp_path)
        logits.append(prefill_logits(load_model(tmp_path), random_prompts(264, 40)))
    assert logits[0] is not None and logits[1] is not None
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("size", "kept", "expert_parallel"),
    [(40, "", False), (48, "", False), (40, "down_proj", False), (40, "", True)],
)
def test_the_shared_expert_joins_experts_of_its_form(
    tmp_path: Path, size: int, kept: str, expert_parallel: bool
) -> None:
    """kept: its part that is in 16 bits, while the experts are in 8 bits."""
    save_hybrid(tmp_path, **EXPERTS | {"shared_expert_intermediate_size": size})
    excluded = [f"mlp.shared_expert.{kept}"] if kept else []
    quantization = {"quant_method": "fp8", "modules_to_not_convert": excluded}
    change_config(tmp_path, quantization_config=quantization)
    model = load_model(tmp_path, expert_parallel=expert_parallel)
    for mlp in (layer.mlp for layer in model.model.layers):
        assert mlp.has_shared == (mlp.shared is None)
        assert mlp.has_shared == ((size, kept, expert_parallel) == (40, "", False))
        assert mlp.num_idle_weights == 9 * 3 * 40 * 64


def test_norms_keep_their_precision_in_16_bits(tmp_path: Path) -> None:
    reference = save_hybrid(tmp_path)
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = load_model(tmp_path, is_compiled=False)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(model.model.norm.weight, 1 + reference.model.norm.weight)
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"attn_output_gate": False}, "attn_output_gate: got false, expected true"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type: got 'sigmoid'"),
        ({"layer_types": ["full_attention"] * 4}, r"layer_types: got 4 of \['full_attention'\]"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layer_types: got 2"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads modulo .*: got 1, expected 0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.75}}, "partial_rotary_factor: got 0.75"),
    ],
)
def test_a_configuration_that_is_not_computed(
    tmp_path: Path, fields: dict[str, object], problem: str
) -> None:
    save_hybrid(tmp_path)
    change_config(tmp_path, **fields)
    with pytest.raises(ModelError, match=problem):
        read_model_config(tmp_path)


def test_defaults_of_a_configuration(tmp_path: Path) -> None:
    save_hybrid(tmp_path)
    change_config(tmp_path, layer_types=None, rope_parameters=None, head_dim=None)
    config = read_model_config(tmp_path)
    assert (config.head_dim, config.rotary_dim) == (256, 64)
    assert config.kinds_of_layers == [*["linear_attention"] * 3, "full_attention"]
    assert SMALL["num_hidden_layers"] == 4
