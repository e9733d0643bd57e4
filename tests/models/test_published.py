"""Every published checkpoint of the Qwen3 family, with shrunken sizes and random weights."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from penstock.kernels.packed.matrices import Integers
from penstock.models.weights import SINGLE_FILE
from penstock.protocol.checkpoint import (
    HYBRID_ARCHITECTURES,
    ModelError,
    read_model_config,
    text_fields,
)
from tests.models.checkpoints import check_tensors, save_checkpoint
from tests.models.forward import load_model, prefill_logits, random_prompts
from tests.models.hybrid import save_hybrid, split_experts
from tests.models.published import PUBLISHED, Published
from tests.models.stored_formats import quantize_checkpoint, quantize_checkpoint_in_blocks

KEPT = (
    "rope_theta",
    "tie_word_embeddings",
    "norm_topk_prob",
    "num_experts_per_tok",
    "rms_norm_eps",
)
"""fields of a configuration that a shrunken model keeps, in addition to the ratio of heads"""
NUM_TOKENS = 42
MAX_PACKED_ERROR = 0.04
"""of logits whose activations are rounded to 8 bits, relative"""


def shrunken(config: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes that differ from the published ones."""
    is_quantized, config = "quantization_config" in config, text_fields(config)
    kv_heads = 2
    sizes = {
        "vocab_size": 264,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads
        * (config["num_attention_heads"] // config["num_key_value_heads"]),
        "max_position_embeddings": 512,
    }
    if "num_experts" in config:
        sizes |= {"num_experts": 16, "moe_intermediate_size": 40}
    if is_hybrid(config):
        per_key = config["linear_num_value_heads"] // config.get("linear_num_key_heads", 16)
        sizes |= {"num_hidden_layers": 4, "linear_num_key_heads": 2}
        sizes["linear_num_value_heads"] = 2 * per_key
        sizes |= {"layer_types": config["layer_types"][:4]} if "layer_types" in config else {}
        if "num_experts" in config:
            sizes["shared_expert_intermediate_size"] = 40
    if is_quantized:  # whole blocks, as the published ones have
        inner = "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"
        blocks = {"hidden_size": 128, **dict.fromkeys(inner, 128), "intermediate_size": 256}
        sizes |= {name: size for name, size in blocks.items() if name in sizes}
    return sizes


def is_hybrid(config: dict[str, Any]) -> bool:
    return not set(HYBRID_ARCHITECTURES).isdisjoint(config.get("architectures") or ())


def distinct() -> list[str]:
    """Return the checkpoints that are served; of those that shrink to equal files, the first."""
    first: dict[str, str] = {}
    for name, one in PUBLISHED.items():
        if not one.refusal:
            first.setdefault(repr((resized(one.config), one.files)), name)
    return list(first.values())


def resized(config: dict[str, Any]) -> dict[str, Any]:
    """Return the `config.json` with shrunken sizes."""
    sizes = shrunken(config)
    if "text_config" in config and is_hybrid(config):
        return config | {"text_config": config["text_config"] | sizes}
    return config | sizes


def quick() -> set[str]:
    """Return checkpoints of which the others differ only in the ratio of heads or in RoPE."""
    first: dict[str, str] = {}
    for name in distinct():
        config, files = text_fields(PUBLISHED[name].config), PUBLISHED[name].files
        kind = [config.get(field) for field in ("architectures", "tie_word_embeddings")]
        method = (config.get("quantization_config") or {}).get("quant_method")
        first.setdefault(repr((kind, method, files)), name)
    return set(first.values())


def write(folder: Path, model: Published) -> PreTrainedModel:
    """Write the checkpoint as published, except for its sizes; return transformers' model of it."""
    sizes, config = shrunken(model.config), text_fields(model.config)
    kept = {name: config[name] for name in KEPT if name in config}
    kept |= {"tie_word_embeddings": True} if "modules.json" in model.files else {}
    kept["head_dim"] = config["head_dim"]
    if is_hybrid(model.config):
        kept |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
        is_next = config["model_type"] == "qwen3_next"
        own = {"family": "Next", "rope_theta": config["rope_theta"]} if is_next else {}
        own |= {"rope_parameters": config["rope_parameters"]} if not is_next else {}
        is_multimodal = "text_config" in model.config
        reference = copy.deepcopy(save_hybrid(folder, is_multimodal, **kept | sizes | own))
        split_experts(folder)
    else:
        reference = save_checkpoint(folder, **kept, **sizes)
    if "quantization_config" in model.config:
        _quantize(folder, reference, model.config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(resized(model.config)))
    for file, content in model.files.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(content)
    if "modules.json" in model.files:  # the embedding is tied to a head that only `reference` has
        tensors = load_file(folder / SINGLE_FILE)
        bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        save_file(bare, folder / SINGLE_FILE)
    return reference


def _quantize(folder: Path, reference: PreTrainedModel, quantization: dict[str, Any]) -> None:
    """Write products of the layers in a format, and set `reference` to what they stand for."""
    if quantization["quant_method"] == "fp8":
        dense = quantize_checkpoint_in_blocks(folder)
    else:
        dense = quantize_checkpoint(folder, quantization)
    for name, numbers in dense.items():
        module, _, _ = name.rpartition(".")
        if ".experts." in module:
            _set_expert(reference, module, numbers)
        else:
            reference.get_submodule(module).weight.data.copy_(numbers)


def _set_expert(reference: PreTrainedModel, name: str, weight: torch.Tensor) -> None:
    """Set one expert's matrix within transformers' tensors of all experts."""
    parent, _, rest = name.partition(".experts.")
    number, _, layer = rest.partition(".")
    experts = reference.get_submodule(f"{parent}.experts")
    if layer == "down_proj":
        experts.down_proj.data[int(number)].copy_(weight)
        return
    half = len(weight)
    start = half if layer == "up_proj" else 0
    experts.gate_up_proj.data[int(number), start : start + half].copy_(weight)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in quick() else pytest.mark.long) for name in distinct()],
)
@torch.inference_mode()
def test_served_and_equal_to_transformers(tmp_path: Path, name: str) -> None:
    """Logits within 1e-4 (e4m3: 1e-3) after each of some tokens, and the same likeliest token."""
    reference = write(tmp_path, PUBLISHED[name])
    check_tensors(tmp_path)
    (tokens,) = random_prompts(264, NUM_TOKENS)
    expected = reference(torch.tensor([tokens])).logits[0]
    found = prefill_logits(load_model(tmp_path), [tokens])
    assert found is not None
    config = read_model_config(tmp_path)
    torch.testing.assert_close(found, expected, atol=1e-3 if config.fp8 else 1e-4, rtol=0.0)
    assert torch.equal(found.argmax(1), expected.argmax(1))
    if config.is_packed:
        _check_packed(tmp_path, tokens, expected)


def _check_packed(folder: Path, tokens: list[int], expected: torch.Tensor) -> None:
    """Compare a model whose integers stay as they are, except for experts."""
    model = load_model(folder, keeps_integers=True)
    assert all(isinstance(one.self_attn.o_proj.weight, Integers) for one in model.model.layers)
    found = prefill_logits(model, [tokens])
    assert found is not None
    assert (found - expected).norm() < MAX_PACKED_ERROR * expected.norm()


@pytest.mark.parametrize("name", [name for name, one in PUBLISHED.items() if one.refusal])
def test_refused_by_a_sentence(tmp_path: Path, name: str) -> None:
    model, folder = PUBLISHED[name], tmp_path / name
    folder.mkdir()
    if model.config:
        (folder / "config.json").write_text(json.dumps(model.config))
    for file, content in model.files.items():
        (folder / file).write_text(content)
    with pytest.raises(ModelError, match=model.refusal) as error:
        read_model_config(folder)
    assert "can't be read" not in str(error.value)
