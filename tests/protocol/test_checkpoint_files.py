"""Files of a checkpoint that can't be served, found before a process starts."""

import json
import re
import shutil
import struct
from pathlib import Path

import pytest

from penstock.models.architecture import describe
from penstock.protocol.checkpoint import ModelError, read_model_config
from penstock.protocol.checkpoint_files import INDEX_FILE, SINGLE_FILE, check_files
from tests.protocol.test_checkpoint import DEMO, changed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    check(tmp_path)
    return tmp_path


def check(folder: Path) -> None:
    config = read_model_config(folder)
    check_files(folder, config, describe(config).tensors())


def safetensors(dtype: str = "BF16", size: int = 1, num_bytes: int = 2) -> bytes:
    tensor = {"dtype": dtype, "shape": [size], "data_offsets": [0, 2]}
    text = json.dumps({"__metadata__": {"format": "pt"}, "a": tensor}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(num_bytes)


SAMPLING = "generation_config.json"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 99\n"
WORD_PIECE = b'{"decoder": {"type": "WordPiece"}, "model": {"vocab": {"a": 0}}}'
CASES = [
    ("tokenizer.json", None, "has no tokenizer.json; a checkpoint needs it"),
    ("tokenizer.json", b"", "tokenizer.json can't be read: Input data was truncated; download"),
    ("tokenizer.json", b"{}", "tokenizer.json can't be read: decoder: got nothing, expected"),
    ("tokenizer.json", POINTER, "of Git LFS to the file: run `git lfs pull`"),
    ("tokenizer.json", WORD_PIECE, r"decoder: got \['WordPiece'\], expected ByteLevel"),
    ("tokenizer_config.json", b"[]", "tokenizer_config.json can't be read: Expected `object`"),
    (SAMPLING, b'{"top_k": "many"}', "config.json can't be read: top_k: got 'many', expected `int"),
    (SAMPLING, b'{"temperature": 5}', "temperature: got 5, expected `float` <= 2.0"),
    (SAMPLING, b'{"repetition_penalty": 5e-324}', "_penalty: got 5e-324, expected `float` >="),
    (SINGLE_FILE, None, "has no model.safetensors; a checkpoint needs it"),
    (SINGLE_FILE, b"", "model.safetensors is not valid safetensors: header too small; down"),
    (SINGLE_FILE, b"\xff" * 99, "model.safetensors is not valid .*: header too large; download it"),
    (SINGLE_FILE, POINTER, "model.safetensors is a pointer of Git LFS .*: run `git lfs pull`"),
    (SINGLE_FILE, safetensors(num_bytes=1), "safetensors: incomplete metadata, file not "),
    (SINGLE_FILE, safetensors("I8", 2), "model.safetensors: a: got I8, expected BF16, F16, F32"),
]


@pytest.mark.parametrize(("name", "content", "sentence"), CASES)
def test_a_damaged_file(folder: Path, name: str, content: bytes | None, sentence: str) -> None:
    path = folder / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match=sentence):
        check(folder)


@pytest.mark.parametrize(
    ("shards", "sentence"),
    [
        ({}, "has no a.safetensors; a checkpoint needs it"),
        ({"a.safetensors": safetensors()}, "got b in a.safetensors, which has no such tensor"),
    ],
)
def test_shards(folder: Path, shards: dict[str, bytes], sentence: str) -> None:
    (folder / SINGLE_FILE).unlink()
    files = {"a": "a.safetensors", "b": "a.safetensors"}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": files}))
    for name, content in shards.items():
        (folder / name).write_bytes(content)
    with pytest.raises(ModelError, match=sentence):
        check(folder)


@pytest.mark.parametrize("content", [POINTER, b"\xff"])
def test_a_chat_template_that_is_no_text(folder: Path, content: bytes) -> None:
    """A pointer would be a template that ignores the messages."""
    (folder / "chat_template.jinja").write_bytes(content)
    with pytest.raises(ModelError, match=r"chat_template\.jinja is "):
        check(folder)


@pytest.mark.parametrize(
    "name", ["generation_config.json", "tokenizer_config.json", "chat_template.jinja", INDEX_FILE]
)
def test_a_broken_link_is_no_missing_file(folder: Path, name: str) -> None:
    """A cache that lacks a blob has one; without the file the model would be served otherwise."""
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../blobs/1")
    with pytest.raises(ModelError, match=f"{name} is a link to a missing file; download"):
        check(folder)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="got a LoRA adapter, expected a model; merge both"):
        read_model_config(tmp_path)


def test_shards_without_an_index(folder: Path) -> None:
    (folder / SINGLE_FILE).rename(folder / "model-00001-of-00002.safetensors")
    with pytest.raises(ModelError, match=f"got model-00001-of-.* without {INDEX_FILE}; download"):
        check(folder)


@pytest.mark.parametrize("file", ["", "..", "../a.safetensors", "a\0b"])
def test_shards_are_files_of_the_folder(folder: Path, file: str) -> None:
    (folder / SINGLE_FILE).unlink()
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(ModelError, match=r"a: got .*, expected a file of its folder"):
        check(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_pickled_weights(folder: Path, name: str) -> None:
    (folder / SINGLE_FILE).rename(folder / name)
    with pytest.raises(ModelError, match=f"got {name}, expected model.safetensors; load it with"):
        check(folder)


def test_a_pipeline_that_needs_no_weights(folder: Path) -> None:
    (folder / SINGLE_FILE).unlink()
    check_files(folder, read_model_config(folder), None)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_shapes_of_tensors_are_those_of_the_configuration(folder: Path, is_sharded: bool) -> None:
    """Read from the file's header, before any weight is loaded."""
    if is_sharded:
        (folder / SINGLE_FILE).rename(folder / "a.safetensors")
        names = [name for name, *_ in describe(read_model_config(folder)).tensors()]
        index = {"weight_map": dict.fromkeys(names, "a.safetensors")}
        (folder / INDEX_FILE).write_text(json.dumps(index))
    for fields, sentence in (
        ({"head_dim": 32}, r"head_dim: model.layers.0.self_attn.q_norm.* \[64\], .* \[32\]"),
        ({"head_dim": None}, "head_dim: "),
        ({"vocab_size": 300}, "vocab_size and hidden_size: model.embed_tokens"),
    ):
        with pytest.raises(ModelError, match=sentence):
            check(changed(folder, **fields))
    check(changed(folder))


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("num_hidden_layers", 3, "num_hidden_layers: got 3, expected 4, as"),
        ("num_hidden_layers", 5, "num_hidden_layers: got 5, expected 4, as"),
        ("tie_word_embeddings", False, "got false, expected true, as lm_head.weight is missing"),
        ("intermediate_size", -1, "intermediate_size: got -1, expected `int` >= 1"),
        ("max_position_embeddings", 10**12, "max_position_embeddings: got 1000000000000, expected"),
    ],
)
def test_a_config_that_the_tensors_contradict(
    folder: Path, field: str, value: object, sentence: str
) -> None:
    with pytest.raises(ModelError, match=re.escape(sentence)):
        check(changed(folder, **{field: value}))


@pytest.mark.parametrize("entry", [{"zzzz": 5000}, {"zzzz": 65}])
def test_ids_of_added_tokens_follow_those_of_the_vocabulary(
    folder: Path, entry: dict[str, int]
) -> None:
    """The tokenizers library counts on, and would give them other ids than the model knows."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= entry
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match=r"added_tokens: got id \d+ of '.*', expected \d+"):
        check(folder)
