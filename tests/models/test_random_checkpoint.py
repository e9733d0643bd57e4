"""Checkpoints with random weights: the published shapes, loaded by transformers and by us."""

import json
import os
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.launch.bench.commands import SIZES
from penstock.launch.commands.cli import main
from penstock.models import random_checkpoint
from penstock.models.architecture import describe
from penstock.models.random_checkpoint import (
    DENSE,
    HYBRID,
    VOCAB_SIZE,
    make_checkpoint,
    shape_of,
)
from penstock.protocol.checkpoint import read_model_config
from penstock.protocol.tokenizer_file import read_eos_token_ids
from tests.models.forward import load_model, prefill_logits

TINY = {
    "vocab_size": 512,
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
PROMPT = list(b"17+25=")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {}
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, framework="pt") as shard:
            found[name] = shard.get_tensor(name)
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in found.values())
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a checkpoint, made with an unusual umask."""
    folder = tmp_path_factory.mktemp("random") / "model"
    before = os.umask(0o027)
    try:
        make_checkpoint(folder, shape_of("0.6B") | TINY, "float32")
    finally:
        os.umask(before)
    return folder


@pytest.fixture
def _without_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the tokenizer, which takes a second and is the same each time."""
    monkeypatch.setattr(random_checkpoint, "_save_tokenizer", lambda _: None)


quick = pytest.mark.usefixtures("checkpoint", "_without_a_tokenizer")


@pytest.mark.parametrize(
    ("size", "num_parameters"),
    [
        ("0.6B", 596_049_920),
        ("1.7B", 1_720_574_976),
        ("4B", 4_022_468_096),
        ("8B", 8_190_735_360),
        ("14B", 14_768_307_200),
        ("32B", 32_762_123_264),
        ("30B-A3B", 30_532_122_624),
        # 55,562,855,904 bytes published, less the vision part and multi-token prediction
        ("3.5-27B", 55_562_855_904 // 2 - 460_730_096 - 424_699_392),
    ],
)
def test_shapes_have_as_many_parameters_as_published(
    tmp_path: Path, size: str, num_parameters: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shape_of(size)))
    tensors = describe(read_model_config(tmp_path)).tensors()
    assert sum(torch.Size(shape).numel() for _, shape, _ in tensors) == num_parameters
    assert (*DENSE, *HYBRID) == SIZES


@pytest.mark.slow
def test_transformers_computes_the_same_of_it(checkpoint: Path) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    found = prefill_logits(load_model(checkpoint), [PROMPT])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@quick
@pytest.mark.slow
def test_transformers_computes_the_same_of_a_hybrid_one(tmp_path: Path) -> None:
    shape = shape_of("3.5-35B-A3B") | TINY | {"num_hidden_layers": 4, "num_experts": 16}
    make_checkpoint(tmp_path, shape | {"linear_num_value_heads": 32}, "float32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    found = prefill_logits(load_model(tmp_path), [PROMPT])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_its_tokenizer_has_qwen3s_ids(checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert len(tokenizer) == 151_669 < VOCAB_SIZE
    text = "Hello, 你好 🙂\n\tdef f(x): return x"
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids) == text
    assert len(token_ids) < len(text.encode())
    assert tokenizer.convert_tokens_to_ids(["<|im_end|>", "<think>"]) == [151_645, 151_668 - 1]
    (tmp_path / "config.json").write_text(json.dumps(shape_of("0.6B")))
    shutil.copy(checkpoint / "generation_config.json", tmp_path)
    assert read_eos_token_ids(tmp_path) == [151_645, 151_643]
    every = range(0, random_checkpoint.NUM_BYTE_PAIRS, 997)
    assert all(tokenizer.decode([token_id]) for token_id in every)


@quick
@pytest.mark.slow
def test_fp8_has_a_scale_for_each_block(checkpoint: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, shape_of("0.6B") | TINY, "float32", quantization="fp8")
    wide, narrow = tensors(checkpoint), tensors(tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"  # [192, 320]
    assert narrow[name].dtype == torch.float8_e4m3fn
    assert narrow[f"{name}_scale_inv"].shape == (2, 3)
    assert narrow["model.embed_tokens.weight"].dtype == torch.float32
    assert read_model_config(tmp_path).fp8
    logits = prefill_logits(load_model(tmp_path), [PROMPT])
    expected = prefill_logits(load_model(checkpoint), [PROMPT])
    assert logits is not None
    assert expected is not None
    error = torch.linalg.vector_norm(logits - expected) / torch.linalg.vector_norm(expected)
    assert 0.001 < error < 0.1
    block = narrow[name][128:, 256:].float() * narrow[f"{name}_scale_inv"][1, 2]
    torch.testing.assert_close(block, wide[name][128:, 256:], rtol=1 / 16, atol=1e-3)


@quick
@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantization", "experts"),
    [("awq", {}), ("gptq", {"num_experts": 4, "num_experts_per_tok": 2})],
)
def test_integers_of_the_usual_deviation(
    tmp_path: Path, quantization: str, experts: dict[str, Any]
) -> None:
    size = "30B-A3B" if experts else "0.6B"
    shape = shape_of(size) | TINY | experts | ({"moe_intermediate_size": 64} if experts else {})
    make_checkpoint(tmp_path, shape, "float32", quantization)
    found = read_model_config(tmp_path)
    assert found.format_name == f"4-bit {quantization.upper()}"
    model = load_model(tmp_path)
    weight = model.model.layers[0].self_attn.qkv_proj.weight
    assert isinstance(weight, torch.Tensor)
    assert 0.019 < float(weight.std()) < 0.021
    assert prefill_logits(model, [PROMPT]) is not None


@quick
@pytest.mark.slow
def test_shards(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_checkpoint, "MAX_SHARD_BYTES", 200_000)
    make_checkpoint(tmp_path, shape_of("0.6B") | TINY, "float32")
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    expected = tensors(checkpoint)
    found = tensors(tmp_path)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_files_have_the_mode_of_the_umask(checkpoint: Path) -> None:
    """The service's user may be another one than the user who made the model."""
    assert {path.stat().st_mode & 0o777 for path in checkpoint.iterdir()} == {0o640}


@quick
@pytest.mark.slow
def test_a_mixture_of_experts(tmp_path: Path) -> None:
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}
    shape = shape_of("30B-A3B") | TINY | experts | {"moe_intermediate_size": 64}
    make_checkpoint(tmp_path, shape, "float32", quantization="fp8")
    found = tensors(tmp_path)
    assert found["model.layers.0.mlp.gate.weight"].dtype == torch.float32
    assert found["model.layers.1.mlp.experts.3.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert prefill_logits(load_model(tmp_path), [PROMPT]) is not None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["0.5B", "x"], "got '0.5B', expected one of 0.6B, 1.7B"),
        (["0.6B", "full"], "full exists and is not an empty folder"),
        (["0.6B", "x", "--layers", "0"], "--layers: got 0, expected 1 or more"),
    ],
)
def test_what_the_command_refuses(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("it was not refused"))
    (tmp_path / "full" / "y").mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["launch", "bench", "make-model", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("error", [OSError, SafetensorError])
def test_a_full_disk_is_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: type[Exception],
    request: pytest.FixtureRequest,
) -> None:
    """For the tokenizer, and for the weights: here as a limit of the files' size."""
    if error is SafetensorError:
        request.getfixturevalue("_without_a_tokenizer")
    monkeypatch.setattr(random_checkpoint, "shape_of", lambda _: shape_of("0.6B") | TINY)
    monkeypatch.setattr(sys, "argv", ["random_checkpoint", "0.6B", str(tmp_path)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(SystemExit, match="File too large") as end:
            random_checkpoint.main()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (sentence,) = str(end.value).splitlines()
    assert sentence.startswith(f"launch: FOLDER: {tmp_path} can't be filled: ")
    assert isinstance(end.value.__context__, error)
