"""Ways in which the demo checkpoint is broken, each with the sentence that refuses it."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Break = Callable[[Path], object]
CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DOWN = "model.layers.2.mlp.down_proj.weight"
NORM = "model.norm.weight"
BOM = b"\xef\xbb\xbf"
POSITIONS = "original_max_position_embeddings"
UNREAD = "config.json can't be read: "
MARKED = "it begins with a byte order mark: save it as UTF-8 without one"
LACKS = f"lacks 1 tensors, such as {DOWN}"
INVALID = "safetensors: invalid shape, data type, or offset for tensor; download it again"


def fields(file: str = CONFIG, **changes: Any) -> Break:
    """Change fields of a file in JSON."""

    def change(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def without(name: str, file: str = CONFIG) -> Break:
    def change(folder: Path) -> None:
        left = json.loads((folder / file).read_text())
        del left[name]
        (folder / file).write_text(json.dumps(left))

    return change


def content(file: str, change: bytes | Callable[[bytes], bytes]) -> Break:
    """Replace or change the bytes of a file."""

    def write(folder: Path) -> None:
        path = folder / file
        path.write_bytes(change if isinstance(change, bytes) else change(path.read_bytes()))

    return write


def absent(file: str) -> Break:
    return lambda folder: (folder / file).unlink()


def instead(file: str, make: Callable[[Path], object]) -> Break:
    """Put something else than a regular file there."""
    return lambda folder: ((folder / file).unlink(missing_ok=True), make(folder / file))


def tensor(old: str, **changes: Any) -> Break:
    """Change the entry of a tensor in the header of the weights."""

    def change(data: bytes) -> bytes:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        entry = header.pop(old) | changes
        text = json.dumps(header | {entry.pop("name", old): entry}).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + size :]

    return content(WEIGHTS, change)


def index(change: Callable[[dict[str, str]], object]) -> Break:
    """Move the weights to `a.safetensors`, and change the index of all tensors."""

    def move(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        names = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        (folder / WEIGHTS).rename(folder / "a.safetensors")
        files = {name: "a.safetensors" for name in names if name != "__metadata__"}
        change(files)
        (folder / INDEX).write_text(json.dumps({"weight_map": files}))

    return move


def config(old: bytes, new: bytes) -> Break:
    return content(CONFIG, lambda data: data.replace(old, new, 1))


def entry(name: str, file: str) -> Break:
    """Change the index of all tensors in one entry."""
    return index(lambda files: files.update({name: file}))


def yarn(**more: Any) -> Break:
    return fields(rope_scaling={"rope_type": "yarn", "factor": 2.0} | more)


def moe(**more: Any) -> Break:
    return fields(architectures=["Qwen3MoeForCausalLM"], **more)


BROKEN: dict[str, tuple[Break, str]] = {
    "rope_theta 0": (fields(rope_theta=0), "rope_theta: got 0.0, expected 2 to 1e+30"),
    "rope_theta -1": (fields(rope_theta=-1), "rope_theta: got -1.0, expected a number of 2 to"),
    "rope_theta huge": (fields(rope_theta=1e300), "rope_theta: got 1e+300, expected 2 to 1e+30"),
    "rope_theta 1e400": (config(b"100000.0", b"1e400"), f"{UNREAD}Number out of range"),
    "rope_theta NaN": (config(b"100000.0", b"NaN"), f"{UNREAD}JSON is malformed"),
    "rope_parameters": (
        fields(rope_theta=None, rope_parameters={"rope_theta": 0}),
        "rope_parameters.rope_theta: got 0, expected 2 to",
    ),
    "yarn factor": (yarn(factor=1e300), "rope_scaling.factor: got 1e+300, expected 1 to 4096"),
    "yarn positions 0": (yarn(**{POSITIONS: 0}), f"rope_scaling.{POSITIONS}: got 0, expected 1 to"),
    "yarn positions -5": (
        fields(**{POSITIONS: -5}, rope_scaling={"type": "yarn", "factor": 2}),
        f"{POSITIONS}: got -5, expected a number of 1 to",
    ),
    "hidden_size -1": (fields(hidden_size=-1), "hidden_size: got -1, expected `int` >= 1"),
    "hidden_size 1e9": (fields(hidden_size=10**9), "hidden_size: got 1000000000, expected `int`"),
    "hidden_size 10**400": (fields(hidden_size=10**400), "hidden_size: got 1000"),
    "hidden_size missing": (without("hidden_size"), "hidden_size: got nothing, expected a value"),
    "vocab_size true": (fields(vocab_size=True), "vocab_size: got True, expected `int`"),
    "vocab_size 264.5": (fields(vocab_size=264.5), "vocab_size: got 264.5, expected `int`"),
    "heads 0": (fields(num_attention_heads=0), "num_attention_heads: got 0, expected `int` >= 1"),
    "intermediate_size": (
        fields(intermediate_size=700),
        "intermediate_size: model.layers.0.mlp.gate_proj.weight has the shape [768, 256], "
        "expected [700, 256]",
    ),
    "rms_norm_eps 0": (fields(rms_norm_eps=0), "rms_norm_eps: got 0, expected `float` >= 1e-30"),
    "architectures": (without("architectures"), "architectures: got None, expected Qwen3ForCausal"),
    "no experts": (moe(), "lacks 1540 tensors, such as model.layers.0.mlp.experts.0.down_proj"),
    "experts -4": (moe(num_experts=-4), "num_experts: got -4, expected `int` >= 0"),
    "experts 1e12": (moe(num_experts=10**12), "num_experts: got 1000000000000, expected `int`"),
    "experts of size 0": (moe(moe_intermediate_size=0), "moe_intermediate_size: got 0, expected"),
    "config empty": (content(CONFIG, b""), f"{UNREAD}Input data was truncated"),
    "config null": (content(CONFIG, b"null"), f"{UNREAD}Expected `object`"),
    "config cut": (content(CONFIG, lambda data: data[:-20]), f"{UNREAD}Input data was truncated"),
    "config with a BOM": (content(CONFIG, lambda data: BOM + data), MARKED),
    "config in UTF-16": (content(CONFIG, lambda data: data.decode().encode("utf-16")), MARKED),
    "config in Latin-1": (
        config(b"qwen3", b"\xff"),
        f"{UNREAD}'utf-8' codec can't decode byte",
    ),
    "config too deep": (config(b"{", b'{"x":' + b"[" * 99_999), UNREAD),
    "config a folder": (instead(CONFIG, Path.mkdir), f"{UNREAD}it is not a regular file"),
    "config a loop": (instead(CONFIG, lambda path: path.symlink_to(path)), "has no config.json; a"),
    "tensor missing": (tensor(DOWN, name="model.rotary_emb.inv_freq"), LACKS),
    "tensor renamed": (tensor(DOWN, name="model.layers.2.mlp.foo.weight"), LACKS),
    "tensor missing in the index": (index(lambda files: files.pop(DOWN)), LACKS),
    "tensor transposed": (
        tensor(DOWN, shape=[768, 256]),
        f"intermediate_size: {DOWN} has the shape [768, 256], expected [256, 768]",
    ),
    "tensor shorter": (tensor(NORM, shape=[255]), INVALID),
    "tensor negative": (tensor(NORM, shape=[-256]), "invalid value: integer `-256`"),
    "tensor beyond the end": (
        tensor(NORM, data_offsets=[0, 10**12]),
        f"offset for tensor `{NORM}`",
    ),
    "tensor backwards": (tensor(DOWN, data_offsets=[9, 0]), f"invalid offset for tensor `{DOWN}`"),
    "tensors that overlap": (tensor(DOWN, data_offsets=[0, 2]), INVALID),
    "another dtype": (tensor(DOWN, dtype="F32"), INVALID),
    "an unknown dtype": (tensor(DOWN, dtype="F4"), INVALID),
    "weights cut": (content(WEIGHTS, lambda data: data[:-9]), "incomplete metadata, file not f"),
    "weights longer": (content(WEIGHTS, lambda data: data + b"x"), "incomplete metadata, file n"),
    "weights of a header": (
        content(WEIGHTS, lambda data: data[:99]),
        "invalid header length; dow",
    ),
    "weights a folder": (instead(WEIGHTS, Path.mkdir), "can't be read: it is not a regular file"),
    "weights a pipe": (instead(WEIGHTS, os.mkfifo), "can't be read: it is not a regular file"),
    "index empty": (content(INDEX, b""), f"{INDEX} can't be read: Input data was truncated"),
    "index a list": (content(INDEX, b"[]"), f"{INDEX} can't be read: Expected `object`"),
    "index without a map": (content(INDEX, b"{}"), f"{INDEX} can't be read: weight_map: got"),
    "index of another file": (entry(DOWN, "b.safetensors"), "has no b.safetensors; a checkpoint"),
    "index of a file elsewhere": (
        entry(DOWN, "../../passwd"),
        f"{DOWN}: got '../../passwd', exp",
    ),
    "index of an unknown tensor": (entry("x", "a.safetensors"), f"{INDEX}: got x in a.safetensors"),
    "temperature -1": (fields(GENERATION, temperature=-1), "temperature: got -1, expected `float`"),
    "top_k -2": (fields(GENERATION, top_k=-2), "top_k: got -2, expected `int` >= -1"),
    "top_p 0": (fields(GENERATION, top_p=0), "top_p: got 0, expected `float` > 0.0"),
    "eos_token_id": (fields(GENERATION, eos_token_id=[[1]]), "eos_token_id[0]: got [1], expected"),
    "temperature 1e999": (
        content(GENERATION, b'{"temperature": 1e999}'),
        "temperature: got NaN o",
    ),
    "generation with a BOM": (content(GENERATION, BOM + b"{}"), MARKED),
    "tokenizer missing": (absent(TOKENIZER), "has no tokenizer.json; a checkpoint needs it"),
    "tokenizer empty": (content(TOKENIZER, b""), "tokenizer.json can't be read: Input data was"),
    "tokenizer a pipe": (instead(TOKENIZER, os.mkfifo), "can't be read: it is not a regular file"),
    "vocabulary empty": (fields(TOKENIZER, model={"vocab": {}}), "model.vocab: got {}, expected"),
    "decoders of text": (
        fields(TOKENIZER, decoder={"type": "Sequence", "decoders": ["ByteLevel"]}),
        "decoder.decoders[0]: got 'ByteLevel', expected `object`",
    ),
    "chat_template 5": (
        fields("tokenizer_config.json", chat_template=5),
        "tokenizer_config.json can't be read: chat_template: got 5, expected",
    ),
    "modules cut": (content("modules.json", b"{"), "modules.json can't be read: "),
}
"""found by the launcher: no process has started"""

SERVED: dict[str, Break] = {
    "unknown keys": fields(foo=1, bar={"x": [None]}),
    "temperature 0": fields(GENERATION, do_sample=True, temperature=0),
    "top_k -1": fields(GENERATION, do_sample=True, top_k=-1),
    "do_sample null": fields(GENERATION, do_sample=None),
    "unknown keys of generation": fields(GENERATION, foo={"a": 1}, transformers_version="9"),
    "eos_token_id a list": fields(GENERATION, eos_token_id=[258, 256, 99_999]),
    "generation missing": absent(GENERATION),
    "shards": index(len),
}
"""odd, but not broken"""
