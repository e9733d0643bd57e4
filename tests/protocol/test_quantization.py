"""Formats of weights that are refused: by field, value and what is expected there."""

from typing import Any

import pytest

from penstock.protocol.quantization import FP8_BLOCKS, read_format

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}

CHANNEL = {"strategy": "channel"}


def compressed(weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a configuration of compressed-tensors."""
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8} | weights}}
    fields = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return fields | {"config_groups": groups} | more


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (AWQ | {"bits": 3}, "quantization_config.bits: got 3, expected "),
        (AWQ | {"version": "gemv"}, "quantization_config.version: got 'gemv', expected 'GEMM'"),
        (GPTQ | {"group_size": 48}, "quantization_config.group_size: got 48, expected "),
        (GPTQ | {"checkpoint_format": "a"}, "checkpoint_format: got 'a', expected 'gptq"),
        (GPTQ | {"dynamic": {".*down_proj": {"bits": 8}}}, "dynamic: got .* expected '-:' before"),
        (FP8_BLOCKS | {"weight_block_size": [64, 64]}, r"got .*64, 64.*, expected .*128, 128"),
        (compressed({"type": "float", "num_bits": 4}), "num_bits: got 4, expected 8 for a float"),
        (compressed({"strategy": "group"}), "group_size: got null, expected a number of columns"),
        (compressed({"strategy": "block"}), "strategy: got 'block', expected 'group' or 'channel'"),
        (compressed({}, format="nvfp4"), "format: got 'nvfp4', expected 'float"),
        (AWQ | {"checkpoint_format": "gemv_fast"}, "checkpoint_format: got 'gemv_fast', expected "),
        (compressed({}, sparsity_config=[1]), r"sparsity_config: got \[1\], expected null"),
        (
            compressed({"group_size": 16}),
            r"group_0\.weights\.group_size: got 16, expected -1",
        ),
        (compressed(CHANNEL, ignore=["re:["]), r"got '\^\(\?:\[\)' for .* expected a regular exp"),
        (compressed({}, config_groups={}), "config_groups: got 0 groups, expected one"),
        ({"quant_method": "modelopt", "quant_algo": "a"}, "quant_algo: got 'a', expected "),
        ({"quant_method": "gguf"}, "got gguf weights, expected 16 bits, FP8, AWQ, GPTQ, compress"),
        ("awq", "quantization_config: got awq, expected an object"),
    ],
)
def test_refuses_by_field(fields: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_format(fields)


@pytest.mark.parametrize(
    "fields",
    [
        AWQ | {"modules_to_not_convert": ["layers.0.mlp"]},
        AWQ | {"dynamic": {r"-:.*\.layers\.0\.mlp\.": {}}},
        FP8_BLOCKS | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.up_proj"]},
        {"quant_method": "fp8", "ignored_layers": ["up_proj"]},
        compressed(CHANNEL, ignore=["re:.*up_proj"], kv_cache_scheme={"num_bits": 8}),
    ],
)
def test_excluded_layers_have_16_bits(fields: dict[str, Any]) -> None:
    """A scheme of the KV cache changes nothing: its scales are not used."""
    read = read_format(fields)
    assert read.of(["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]) is None
    assert read.of(["model.layers.0.self_attn.q_proj"]) == read


def test_parts_of_a_weight() -> None:
    groups = read_format(AWQ)
    parts = [cut(groups, columns) for columns in (512, 192, 96, 72)]
    assert [part and part.group_size for part in parts] == [128, 64, 32, None]
    by_order = read_format(GPTQ | {"desc_act": True})
    assert cut(by_order, 512) is None
    assert by_order.after_cut(rows=[96]) == by_order
    blocks = read_format(FP8_BLOCKS)
    assert blocks.after_cut(rows=[256, 128]) == blocks
    assert cut(blocks, 192).scales == "rows"


def cut(weight_format: Any, columns: int) -> Any:
    """Return the format of a part with these columns."""
    return weight_format.after_cut(columns=columns)
