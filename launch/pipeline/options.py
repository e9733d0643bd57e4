"""Flags of the command line, derived from the fields of a struct; the options of each model.

Of several models, an option after a `--model` belongs to that model. An option before the first
`--model` belongs to every model. Options of the pipeline (`--http-port`) belong to the pipeline
wherever they stand.
"""

import argparse
import ast
import functools
import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct

from penstock.launch.pipeline.errors import LaunchError
from penstock.protocol.config import MODEL_OPTIONS, Config

# types with parts, which are written as JSON on the command line
PARTED = {msgspec.inspect.DictType, msgspec.inspect.ListType, msgspec.inspect.StructType}

# options with other names in vLLM, SGLang or nano-vllm
OTHER_NAMES = {
    "data_parallel_size": "dp",
    "host": "http_host",
    "kvcache_block_size": "block_size",
    "model_path": "model",
    "num_gpu_blocks_override": "num_blocks",
    "port": "http_port",
    "tensor_parallel_size": "tp",
    "tp_size": "tp",
}


def flag(field: str) -> str:
    """Return the flag of a field: `max_num_seqs` → `--max-num-seqs`."""
    return "--" + field.replace("_", "-")


def add_options(
    parser: "argparse.ArgumentParser | argparse._ArgumentGroup",
    struct: type[Struct],
    fields: Iterable[str] = (),
    actions: Mapping[str, type[argparse.Action]] = MappingProxyType({}),
    names: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Add a flag for each field, or for `fields`. Fields that are not given are not set.

    actions: field → action instead of storing the value. names: field → additional flag.
    """
    hints = get_type_hints(struct, include_extras=True)
    for field in fields or struct.__struct_fields__:
        hint = hints[field]
        own = {"action": actions[field]} if field in actions else {}
        parser.add_argument(
            *filter(None, (flag(field), names.get(field))),
            dest=field,
            default=argparse.SUPPRESS,
            help=_help(struct, field),
            **(_bool_or_value(struct, field, hint) | own),
        )


def add_name(command: argparse.ArgumentParser) -> None:
    """Add `--name`, the name of a running pipeline."""
    add_options(command, Config, ["name"])


def name_of(arguments: argparse.Namespace) -> str:
    """Return the pipeline's name, given before or after the command, or the default name."""
    return str(getattr(arguments, "name", Config().name))


def add_pipeline_options(parser: argparse.ArgumentParser, fields: Iterable[str]) -> None:
    """Add options of a pipeline that a command starts; in the help, they follow its own options."""
    group = parser.add_argument_group("options of the pipeline that it starts")
    add_options(group, Config, fields)


def given_options(arguments: argparse.Namespace, struct: type[Struct]) -> dict[str, Any]:
    """Return the fields of `struct` that were given."""
    return {k: v for k, v in vars(arguments).items() if k in struct.__struct_fields__}


def as_flags(options: dict[str, Any]) -> Iterator[str]:
    """Yield the options as flags of `launch all`."""
    for field, value in options.items():
        if isinstance(value, bool):
            yield flag(field) if value else f"--no-{flag(field)[2:]}"
        elif isinstance(value, list | tuple):
            yield from (flag(field), *map(str, value))
        else:
            yield from (flag(field), str(value))


class NextModel(argparse.Action):
    """Action of `--model`, which begins the options of a model."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        before = _model_options(namespace)
        for field in before:
            delattr(namespace, field)
        namespace.before = [*getattr(namespace, "before", []), before]
        setattr(namespace, self.dest, values)


def options_by_model(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the given options of each model, including those of the pipeline.

    Raises LaunchError for a model without `--model` next to other models.
    """
    before: list[dict[str, Any]] = getattr(arguments, "before", [])
    if (model := getattr(arguments, "positional_model", None)) is not None:
        if before:
            raise LaunchError(
                f"MODEL: got {model!r} and --model {arguments.model}, expected one of them; "
                "several models are --model A --model B"
            )
        arguments.model = model
    common, *own = [*before, _model_options(arguments)]
    given = given_options(arguments, Config)
    pipeline = {field: given[field] for field in given if field not in MODEL_OPTIONS}
    return [pipeline | common | options for options in own or [{}]]


def _model_options(arguments: argparse.Namespace) -> dict[str, Any]:
    given = given_options(arguments, Config)
    return {option: value for option, value in given.items() if option in MODEL_OPTIONS}


def _bool_or_value(struct: type[Struct], field: str, hint: Any) -> dict[str, Any]:
    plain = hint
    while hasattr(plain, "__metadata__"):
        plain = get_args(plain)[0]
    if plain is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(plain) is Literal:
        return {"choices": get_args(plain)}
    for kind in (plain, *get_args(plain)):
        if get_origin(kind) is tuple:  # a tuple of any length
            item = _converter(field, get_args(kind)[0], is_json=False)
            return {"type": item, "nargs": "+", "metavar": field.upper()}
    kinds = _kinds(_fields(struct)[field].type)
    is_json = bool(kinds & PARTED) and msgspec.inspect.StrType not in kinds
    metavar = "JSON" if is_json else "N" if "num_" in field else field.rpartition("_")[2].upper()
    return {"type": _converter(field, hint, is_json), "metavar": metavar}


def _kinds(kind: msgspec.inspect.Type) -> set[type]:
    """Return the types of a value, without limits and descriptions."""
    if isinstance(kind, msgspec.inspect.Metadata):
        return _kinds(kind.type)
    if isinstance(kind, msgspec.inspect.UnionType):
        return set().union(*map(_kinds, kind.types))
    return {type(kind)}


def _converter(field: str, hint: Any, is_json: bool) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            if is_json:
                return msgspec.json.decode(text, type=hint)
            value = msgspec.convert(text, hint, strict=False)
        except msgspec.DecodeError as error:
            reason = re.sub(", got `[a-z]+`", "", str(error).partition(" - at ")[0])
            reason = reason.replace("Expected", "expected")
            raise LaunchError(f"{flag(field)}: got {text!r}, {reason}") from None
        if isinstance(value, float) and math.isinf(value):  # JSON lacks infinity
            raise LaunchError(f"{flag(field)}: got {text!r}, expected a finite number")
        return value

    return convert


@functools.cache
def _fields(struct: type[Struct]) -> dict[str, msgspec.inspect.Field]:
    info = msgspec.inspect.type_info(struct)
    assert isinstance(info, msgspec.inspect.StructType)  # noqa: S101  for mypy
    return {field.name: field for field in info.fields}


def _help(struct: type[Struct], field: str) -> str:
    shown = _shown(struct, field)
    default = f"(default: {shown.strip('`')})" if shown else ""
    return f"{_description(struct, field)} {default}".strip().replace("%", "%%")


def _description(struct: type[Struct], field: str) -> str:
    described = _fields(struct)[field].type
    extra = described.extra_json_schema if isinstance(described, msgspec.inspect.Metadata) else None
    definer = next(
        kind for kind in struct.__mro__ if field in vars(kind).get("__annotations__", ())
    )
    return (extra or {}).get("description", "") or _docstrings(definer).get(field, "")


@functools.cache
def _docstrings(struct: type[Struct]) -> dict[str, str]:
    """Return the strings after fields in the source of a struct."""
    (definition,) = ast.parse(inspect.getsource(struct)).body
    assert isinstance(definition, ast.ClassDef)  # noqa: S101  for mypy
    found = {}
    for field, text in itertools.pairwise(definition.body):
        match field, text:
            case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(described))):
                found[name] = " ".join(described.split())
    return found


def _shown(struct: type[Struct], field: str) -> str:
    default = _fields(struct)[field].default
    if default is None or default is msgspec.NODEFAULT:
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    return f"`{default}`" if default != "" else ""
