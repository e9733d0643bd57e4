"""Formats of quantized weights: `quantization_config` of a checkpoint's `config.json`.

Formats of FP8, AWQ, GPTQ, compressed-tensors and modelopt are read into a `WeightFormat`.
"""

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import msgspec
from msgspec import Struct

from penstock.protocol.decoding import explain

BLOCK = 128  # rows and columns of a block of e4m3 values that share a scale
# `quantization_config` of e4m3 with a scale for each block of a weight
FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
MIN_GROUP = 32  # minimum columns per scale for the matrix products of packed weights
FIELD = "quantization_config"
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GroupSize = Literal[-1, 32, 64, 128, 256, 512, 1024]
Gemm = Literal["gemm", "GEMM"]
# pattern of layers' names, with a sign in front → fields of these layers
Overrides = dict[str, dict[str, Any]]


class WeightFormat(Struct, frozen=True, kw_only=True):
    """Storage of the matrices of the layers: e4m3 with scales, or packed integers."""

    name: str  # readable name, such as `4-bit AWQ`
    # unit that has a scale: rows or blocks of e4m3 values, groups of columns of integers
    scales: Literal["rows", "blocks", "groups"] = "rows"
    bits: Literal[4, 8] = 8
    group_size: int = 0  # integers: columns of a row that share a scale; 0: the whole row
    act_order: bool = False  # True if the columns of a group need not be adjacent
    awq_order: bool = False  # True if the nibbles of a number of 32 bits are in AWQ's order
    zero_offset: int = 0  # number to be added to stored zero points
    # regular expressions that match the names of layers in 16 bits
    ignored: tuple[str, ...] = ()

    @property
    def is_fp8(self) -> bool:
        return self.scales != "groups"

    def of(self, layers: Iterable[str]) -> "WeightFormat | None":
        """Return the format of a weight joined from `layers`; None: one of them has 16 bits."""
        names = list(layers)
        is_plain = any(re.search(pattern, name) for pattern in self.ignored for name in names)
        return None if is_plain else self

    def after_cut(self, rows: Iterable[int] = (), columns: int = 0) -> "WeightFormat | None":
        """Return the format of a part of the weight; None: 16 bits, because no format fits.

        Blocks keep their scales if each part has whole blocks; otherwise rows get scales. Groups
        become smaller. rows: numbers of rows of the parts. columns: number of columns of the
        part; 0 if the columns are not cut.
        """
        if self.scales == "blocks" and any(size % BLOCK for size in (*rows, columns)):
            return msgspec.structs.replace(self, scales="rows")
        if self.scales != "groups" or not columns:
            return self
        group = math.gcd(self.group_size, columns) if self.group_size else 0
        if self.act_order or 0 < group < MIN_GROUP:
            return None
        return msgspec.structs.replace(self, group_size=group)


FP8_ROWS = WeightFormat(name="fp8")  # format of `--quantization fp8`


class _Fp8(Struct):
    weight_block_size: list[int] | None = None
    modules_to_not_convert: list[str] = []
    ignored_layers: list[str] = []


class _Awq(Struct):
    bits: Literal[4]
    group_size: GroupSize
    version: Gemm = "gemm"
    format: Gemm = "gemm"
    checkpoint_format: Gemm = "gemm"  # name of `version` in GPTQModel and transformers 5
    modules_to_not_convert: list[str] = []
    dynamic: Overrides = {}


class _Gptq(Struct):
    bits: Literal[4, 8]
    group_size: GroupSize
    desc_act: bool = False
    sym: bool = True
    checkpoint_format: Literal["gptq", "gptq_v2"] = "gptq"
    pack_dtype: Literal["int32"] = "int32"
    dynamic: Overrides = {}
    modules_in_block_to_quantize: list[list[str]] | None = None


class _Weights(Struct):
    num_bits: Literal[4, 8]
    type: Literal["int", "float"] = "int"
    strategy: Literal["group", "channel", "tensor", "block"] = "group"
    group_size: GroupSize | None = None
    block_structure: list[int] | None = None
    symmetric: bool = True
    actorder: bool | Literal["group", "weight", "static"] | None = None


class _Scheme(Struct):
    weights: _Weights
    targets: list[str]
    format: str | None = None


class _Compressed(Struct):
    config_groups: dict[str, _Scheme]
    format: Literal["pack-quantized", "int-quantized", "float-quantized", "naive-quantized"]
    ignore: list[str] = []
    quantization_status: Literal["compressed"] = "compressed"


class _Modelopt(Struct):
    quant_algo: Literal["FP8"]
    ignore: list[str] = []
    exclude_modules: list[str] = []


def read_format(fields: Any) -> WeightFormat:
    """Return the format that `quantization_config` describes. Raises ValueError."""
    if not isinstance(fields, dict):
        raise ValueError(f"{FIELD}: got {fields}, expected an object")
    found = _read({name: value for name, value in fields.items() if value is not None})
    for pattern in found.ignored:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"{FIELD}: got {pattern!r} for the names of layers, expected a regular expression: "
                f"{error}"
            ) from error
    return found


def _read(given: dict[str, Any]) -> WeightFormat:
    match given.get("quant_method"):
        case "fp8":
            return _read_fp8(given)
        case "awq":
            return _read_awq(_converted(given, _Awq))
        case "gptq":
            return _read_gptq(_converted(given, _Gptq))
        case "compressed-tensors":
            return _read_compressed(given)
        case "modelopt":
            read = _converted(given, _Modelopt)
            ignored = [_glob(name) for name in (*read.ignore, *read.exclude_modules)]
            return WeightFormat(name="modelopt fp8", ignored=tuple(ignored))
    raise ValueError(
        f"{FIELD}: got {_described(given)} weights, expected 16 bits, FP8, AWQ, GPTQ, "
        "compressed-tensors or modelopt FP8"
    )


def _converted(fields: dict[str, Any], kind: type[Any]) -> Any:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{FIELD}.{explain(str(error), fields, kind)[1]}") from error


def _read_fp8(fields: dict[str, Any]) -> WeightFormat:
    found = {name: fields.get(name) for name in FP8_BLOCKS}
    read = _converted(fields, _Fp8)
    ignored = _modules([*read.modules_to_not_convert, *read.ignored_layers])
    if read.weight_block_size is None:
        return msgspec.structs.replace(FP8_ROWS, ignored=ignored)
    if found != FP8_BLOCKS:
        raise ValueError(f"{FIELD}: got {found}, expected {FP8_BLOCKS}")
    return WeightFormat(name="fp8", scales="blocks", ignored=ignored)


def _read_awq(read: _Awq) -> WeightFormat:
    return WeightFormat(
        name="4-bit AWQ",
        scales="groups",
        bits=read.bits,
        group_size=max(read.group_size, 0),
        awq_order=True,
        ignored=(*_modules(read.modules_to_not_convert), *_excluded(read.dynamic)),
    )


def _modules(names: Iterable[str]) -> tuple[str, ...]:
    """Return regular expressions that match modules by their names or suffixes of the names."""
    return tuple(rf"(^|\.){re.escape(name)}(\.|$)" for name in names)


def _excluded(dynamic: Overrides) -> Iterator[str]:
    """Yield the regular expressions of layers in 16 bits. Raises ValueError for other overrides."""
    for pattern, overrides in dynamic.items():
        if not pattern.startswith("-:"):
            raise ValueError(
                f"{FIELD}.dynamic: got {overrides} for {pattern!r}, expected '-:' before the names "
                "of layers that are not quantized, and one format for all others"
            )
        yield f"^(?:{pattern[2:]})"


def _read_gptq(read: _Gptq) -> WeightFormat:
    ignored = [*_excluded(read.dynamic)]
    if read.modules_in_block_to_quantize is not None:
        quantized = {name for names in read.modules_in_block_to_quantize for name in names}
        last = {name.rpartition(".")[2] for name in quantized}
        ignored += [rf"\.{name}$" for name in LINEAR if name not in last]
    return WeightFormat(
        name=f"{read.bits}-bit GPTQ",
        scales="groups",
        bits=read.bits,
        group_size=max(read.group_size, 0),
        act_order=read.desc_act and read.group_size > 0,
        zero_offset=1 if read.checkpoint_format == "gptq" else 0,
        ignored=tuple(ignored),
    )


def _read_compressed(fields: dict[str, Any]) -> WeightFormat:
    for name in ("sparsity_config", "transform_config"):
        found = fields.get(name)
        if found and not (isinstance(found, dict) and found.get("format") == "dense"):
            raise ValueError(f"{FIELD}.{name}: got {found}, expected null")
    read = _converted(fields, _Compressed)
    if len(read.config_groups) != 1:
        raise ValueError(
            f"{FIELD}.config_groups: got {len(read.config_groups)} groups, expected one; layers of "
            "several formats are not served"
        )
    ((name, scheme),) = read.config_groups.items()
    weights, path = scheme.weights, f"{FIELD}.config_groups.{name}"
    if "Linear" not in scheme.targets:
        raise ValueError(f"{path}.targets: got {scheme.targets}, expected ['Linear']")
    ignored = tuple(
        f"^(?:{name[3:]})" if name.startswith("re:") else f"^{re.escape(name)}$"
        for name in read.ignore
    )
    described = f"compressed-tensors W{weights.num_bits}"
    if weights.type == "float":
        scales = _float_scales(weights, f"{path}.weights")
        return WeightFormat(name=f"{described} fp8", scales=scales, ignored=ignored)
    if weights.strategy == "block":
        raise ValueError(f"{path}.weights.strategy: got 'block', expected 'group' or 'channel'")
    if weights.strategy == "group" and weights.group_size is None:
        raise ValueError(f"{path}.weights.group_size: got null, expected a number of columns")
    grouped = weights.strategy == "group"
    return WeightFormat(
        name=described,
        scales="groups",
        bits=weights.num_bits,
        group_size=max(weights.group_size or 0, 0) if grouped else 0,
        act_order=grouped and weights.actorder in ("group", True),
        ignored=ignored,
    )


def _float_scales(weights: _Weights, path: str) -> Literal["rows", "blocks"]:
    if weights.num_bits != 8:
        raise ValueError(f"{path}.num_bits: got {weights.num_bits}, expected 8 for a float")
    if not weights.symmetric:
        raise ValueError(f"{path}.symmetric: got false, expected true for a float")
    if weights.strategy == "group":
        raise ValueError(f"{path}.strategy: got 'group', expected 'tensor', 'channel' or 'block'")
    if weights.strategy != "block":
        return "rows"
    if weights.block_structure != [BLOCK, BLOCK]:
        found = weights.block_structure
        raise ValueError(f"{path}.block_structure: got {found}, expected {[BLOCK, BLOCK]}")
    return "blocks"


def _glob(pattern: str) -> str:
    """Return the regular expression for a name in modelopt's files, in which `*` is any text."""
    return "^" + re.escape(pattern).replace(r"\*", ".*") + "$"


def _described(fields: dict[str, Any]) -> str:
    """Return the name of a format that is not served, such as `4-bit MLX`."""
    bits = f"{fields['bits']}-bit " if "bits" in fields else ""
    method = str(fields.get("quant_method") or "")
    return bits + (method or ("MLX" if "group_size" in fields else "unknown"))
