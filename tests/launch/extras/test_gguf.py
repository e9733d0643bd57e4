"""GGUF files as checkpoints: equal numbers, the same tokens, refusals by a sentence."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from tokenizers import Tokenizer

from penstock.launch.gguf import GROUP, write_tokenizer
from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.hub import resolve
from penstock.models.architecture import describe
from penstock.models.parallel import Layer
from penstock.protocol.checkpoint import read_model_config
from penstock.protocol.checkpoint_files import check_files
from penstock.protocol.tokenizer_file import read_chat_templates
from tests.launch.extras.gguf_files import add_tokenizer, save_numbers, write_gguf
from tests.models.checkpoints import EXPERTS, save_checkpoint
from tests.models.forward import load_model, prefill_logits

SHAPE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 1}
INCOMPLETE = "is not a complete GGUF file of version 2 or 3; download it again"
SPARSE = EXPERTS | SHAPE | {"num_experts": 4, "moe_intermediate_size": 256, "mlp_only_layers": []}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a small model in Q8_0, made of `made` beside it."""
    save_checkpoint(tmp_path / "made", **SHAPE)
    write_gguf(tmp_path / "made", tmp_path / "model.gguf", "Q8_0")
    return tmp_path / "model.gguf"


def refused(file: Path, sentence: str) -> None:
    with pytest.raises(LaunchError, match=sentence):
        resolve({"model": str(file)})


def write_fields(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@pytest.mark.parametrize("shape", [SHAPE, SPARSE], ids=["dense", "experts"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "Q6_K", "F16"])
def test_numbers_are_those_of_the_file(tmp_path: Path, kind: str, shape: dict[str, Any]) -> None:
    """Q8_0: as float16, in every bit. Other matrices: within half a step of 8 bits."""
    made, file = tmp_path / "made", tmp_path / "model.gguf"
    save_checkpoint(made, **shape)
    numbers = write_gguf(made, file, kind)
    save_numbers(numbers, made)
    options = resolve({"model": str(file)})
    assert options["served_model_name"] == "model"
    folder = Path(options["model"])
    config = read_model_config(folder)
    check_files(folder, config, describe(config).tensors())
    found, wanted = (load_model(one, is_compiled=False) for one in (folder, made))
    others = dict(wanted.named_modules())
    num_layers = 0
    for name, layer in found.named_modules():
        if not isinstance(layer, Layer):
            continue
        num_layers += 1
        weight, exact = layer.weight.float(), others[name].weight.float()  # type: ignore[union-attr]
        if kind == "Q8_0" or name in ("model.embed_tokens", "lm_head") or name.endswith(".gate"):
            dtype = torch.float16 if "proj" in name or "experts" in name else torch.bfloat16
            assert torch.equal(weight, exact.to(dtype).float()), name
            continue
        groups = exact.unflatten(-1, (-1, GROUP)).abs().amax(-1, keepdim=True)
        error = (weight - exact).abs().unflatten(-1, (-1, GROUP))
        assert (error <= groups * (1 / 254 + 2**-8)).all(), name
    assert num_layers > 4
    prompts = [[1, 2, 3, 4, 5]]
    logits, expected = prefill_logits(found, prompts), prefill_logits(wanted, prompts)
    assert logits is not None
    assert expected is not None
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()


def test_a_file_is_converted_once(file: Path, tmp_path: Path) -> None:
    first = Path(resolve({"model": str(file)})["model"])
    (first / "mark").touch()
    assert Path(resolve({"model": str(file)})["model"]) == first
    assert (first / "mark").exists()
    assert len(list(first.parent.iterdir())) == 1
    write_gguf(tmp_path / "made", file, "F16")
    assert Path(resolve({"model": str(file)})["model"]) != first


NUM_MERGES = 10_000
"""the package that reads GGUF files takes seconds for all of them"""
TEXTS = [
    "Hello world, it's 12345 o'clock…\n\n  and  tabs\tare\r\nhere ",
    "<|im_start|>user\nGrüße 日本語 🙂 e\u0301<|im_end|>\n<think>\n</think>",
    "def f(x):\n    return x**2  # ∑ ﷽ <tool_call>",
]


def test_the_tokenizer_of_qwen3(tmp_path: Path, qwen3_folder: Path) -> None:
    """The ids of texts are those of the published tokenizer.json, with its first merges."""
    made = json.loads((qwen3_folder / "tokenizer.json").read_text())
    model, num_tokens = made["model"], 256 + NUM_MERGES
    model["merges"] = model["merges"][:NUM_MERGES]
    model["vocab"] = {token: n for token, n in model["vocab"].items() if n < num_tokens}
    for number, one in enumerate(made["added_tokens"], num_tokens):
        one["id"] = number
    writer = GGUFWriter(tmp_path / "model.gguf", "qwen3")
    add_tokenizer(writer, made, "{{ tools }}")
    write_fields(writer)
    fields = GGUFReader(tmp_path / "model.gguf").fields.items()
    write_tokenizer(tmp_path, {name: one.contents() for name, one in fields}, tmp_path)
    ours = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    published = Tokenizer.from_str(json.dumps(made))
    for text in TEXTS:
        ids = published.encode(text).ids
        assert ours.encode(text).ids == ids
        assert ours.decode(ids) == published.decode(ids)
    assert read_chat_templates(tmp_path) == {"default": "{{ tools }}"}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is not a GGUF file; download it again"),
        (b"GGUF", INCOMPLETE),
        (b"GGUF\1\0\0\0" + bytes(100), INCOMPLETE),
        (b"PK\3\4" + bytes(100), "is not a GGUF file; download it again"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS to the file"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    refused(tmp_path / "model.gguf", sentence)
    assert not any((tmp_path / "cache").rglob("*.json"))


@pytest.mark.parametrize("size", [100, 5000, -1, -100_000])
def test_files_that_are_cut_off_are_refused(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])
    refused(file, INCOMPLETE)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (b"qwen3", b"qwen\xff", INCOMPLETE),
        (b"blk.0.attn_q.weight", b"blk.attn_q.0.weight", "got a tensor blk.attn_q.0.weight, exp"),
    ],
)
def test_fields_that_are_changed_are_refused(
    file: Path, old: bytes, new: bytes, sentence: str
) -> None:
    file.write_bytes(file.read_bytes().replace(old, new, 1))
    refused(file.rename(file.with_suffix(".GGUF")), sentence)


def test_a_type_without_numbers_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "made", **SHAPE)
    file = tmp_path / "model.gguf"
    write_gguf(tmp_path / "made", file, "F32")
    data = file.read_bytes()
    at = data.index(b"blk.0.attn_q.weight") + 19 + 4 + 2 * 8  # number of dimensions, dimensions
    file.write_bytes(data[:at] + struct.pack("<I", GGMLQuantizationType.I32) + data[at + 4 :])
    refused(file, r"blk\.0\.attn_q\.weight: got I32 of shape \[256, 256\]")


def test_a_user_without_a_home_folder_gets_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    (tmp_path / "model.gguf").touch()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    refused(tmp_path / "model.gguf", r"home directory\. Set HOME")


def test_other_models_are_refused(tmp_path: Path) -> None:
    write_fields(GGUFWriter(tmp_path / "model.gguf", "llama"))
    refused(tmp_path / "model.gguf", r"general\.architecture: got 'llama', expected qwen3")
    refused(tmp_path / "none.gguf", "expected an existing folder or GGUF file")
