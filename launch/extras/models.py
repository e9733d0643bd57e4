"""`launch models`: the checkpoints on this machine, their memory, and whether they fit."""

import contextlib
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil
from msgspec import Struct

from penstock.launch.commands.gpus import physical_gpus
from penstock.launch.commands.status import as_json
from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.options import add_options, given_options
from penstock.models.architecture import Architecture, Layer, Ranks, Weight
from penstock.models.architecture import describe as describe_model
from penstock.protocol.checkpoint import ModelConfig, ModelError, read_model_config
from penstock.protocol.checkpoint_files import check_files, has_mtp, weight_files
from penstock.protocol.config import Config
from penstock.protocol.quantization import WeightFormat

CONTEXT = 32_768  # tokens of KV cache with which a model must fit
MAX_TP = 8
INTEGER_BITS = {"int8": 8, "int4": 4}  # by --quantization, on CPUs
DEFAULTS = Config()
OUTER = "embedding", "head"  # kinds of layers outside the decoder layers
SCALE_BITS = 32  # bits of the scale of a group of integers, including its zero point on GPUs
INTEGER_GROUP = 64  # columns of a group of integers on CPUs
TEMPORARIES = 4  # copies of a matrix while it is quantized to integers
STATE_BLOCKS = 3  # of a sequence and of padded rows, in the memory of the KV cache
BLOCK_SIZE = 16  # tokens of a KV block; larger blocks change sizes by less than a block
# bytes of the driver, compiled kernels and the allocator's rounding in each worker: at most 1,140
# MiB, measured for 0.6B and 8B on an H200
GPU_CONTEXT_BYTES = 1200 << 20


class Machine(Struct):
    """Memory of this machine in bytes."""

    gpus: list[int]
    ram: int


class Listed(Struct, kw_only=True):
    """Checkpoint, with the needs of each worker of the smallest group that fits."""

    model: str  # as given to `--model`
    folder: str
    refusal: str = ""  # reason why it is not served; the other fields are then unset
    dtype: str = ""
    fits: bool = False
    tp: int = 1
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    kv_bytes_of_32k: int = 0
    # bytes of KV blocks in whose place a state block lies: a sequence's state or a checkpoint
    state_bytes: int = 0
    needed_bytes: int = 0  # with 32k tokens of KV cache, and an estimate for the largest step
    available_bytes: int = 0  # bytes of one GPU or of the RAM, by --gpu-memory-utilization
    max_tokens: int = 0  # tokens that fit into the KV cache, of a sequence that runs alone


class Layout(NamedTuple):
    """Choices that determine how much memory a worker needs."""

    tp: int = 1
    on_gpus: bool = True
    quantize_lm_head: bool = False
    fp8_kv_cache: bool = False
    integer_bits: int = 0  # bits of the layers' matrices on CPUs; 0: not integers

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.tp, on_gpus=self.on_gpus)

    @property
    def element_bytes(self) -> int:
        """Return the bytes of an unquantized number."""
        return 2 if self.on_gpus else 4


class Needs(NamedTuple):
    """Memory of each worker in bytes."""

    weights: int
    kv_per_token: int
    step: int  # additional bytes of the largest step
    start: int = 0  # bytes while weights are loaded, before the KV cache exists
    state: int = 0  # bytes of a state block

    def with_context(self, num_tokens: int) -> int:
        """Return all bytes with a KV cache of `num_tokens` tokens."""
        kv = self.kv_per_token * num_tokens + STATE_BLOCKS * self.state
        return max(self.start, self.weights + self.step + kv)

    def num_tokens(self, num_bytes: float) -> int:
        """Return the tokens whose keys and values also fit into `num_bytes`; 0: none."""
        if num_bytes < self.start:
            return 0
        left = num_bytes - self.weights - self.step - STATE_BLOCKS * self.state
        return int(max(0, left) // self.kv_per_token)


def add_arguments(command: ArgumentParser) -> None:
    """Add the arguments of `launch models`."""
    command.set_defaults(run=_run)
    text = "of checkpoints that are not in the cache"
    command.add_argument("folders", type=Path, nargs="*", metavar="FOLDER", help=text)
    command.add_argument("--json", action="store_true", help="print JSON")
    add_options(
        command,
        Config,
        [
            "quantization",
            "quantize_lm_head",
            "kv_cache_dtype",
            "gpu_memory_utilization",
            "speculative_method",
        ],
    )


def _run(arguments: Namespace) -> int:
    """Print the list. Raises LaunchError for a missing folder; other errors are in the list."""
    for folder in arguments.folders:
        with contextlib.suppress(OSError):  # such a folder is listed with its error
            if not folder.exists():
                raise LaunchError(f"FOLDER: got {folder}, expected an existing folder")
    config = Config(**given_options(arguments, Config))
    gpus = [gpu.num_bytes for gpu in physical_gpus() or () if gpu.num_bytes]
    machine = Machine(gpus, psutil.virtual_memory().total)
    found = [("", folder) for folder in arguments.folders] or list(cached())
    models = [
        checked(describe(name or str(folder), folder, config, machine)) for name, folder in found
    ]
    if arguments.json:
        print(as_json({"machine": machine, "models": models}))
    else:
        print(as_text(models, machine))
    return 0


def cached() -> Iterator[tuple[str, Path]]:
    """Yield the name and the newest snapshot's folder of each model in the cache."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    try:
        repositories = sorted(cache.glob("models--*--*"))
    except OSError as error:
        text = f"{cache} can't be read: {error.strerror}; HF_HOME names another cache"
        raise LaunchError(text) from error
    for repository in repositories:
        snapshots = [path.parent for path in repository.glob("snapshots/*/config.json")]
        if snapshots:
            newest = max(snapshots, key=lambda path: path.stat().st_mtime)
            yield repository.name.removeprefix("models--").replace("--", "/"), newest


def describe(name: str, folder: Path, config: Config, machine: Machine) -> Listed:
    """Return the needs of a checkpoint on this machine, with the options in `config`."""
    listed = Listed(model=name, folder=str(folder))
    try:
        method = config.speculative_method
        if method == "auto" and machine.gpus and has_mtp(folder):
            method = "mtp"
        model = read_model_config(folder, config.quantization, method)
        describe_model(model)
        _check_integers(model, config, machine)
        missing = [file for file in weight_files(folder) if not (folder / file).exists()]
        if missing and name != str(folder):
            raise ModelError(
                f"{missing[0]} is not downloaded; `launch all --model {name}` continues"
            )
    except (ModelError, OSError) as error:
        return _refused(listed, error)
    memory = min(machine.gpus, default=machine.ram) * config.gpu_memory_utilization
    sizes = [tp for tp in (1, 2, 4, MAX_TP) if tp <= len(machine.gpus)] or [1]
    for tp in sizes:
        layout = Layout(
            tp=tp,
            on_gpus=bool(machine.gpus),
            quantize_lm_head=config.quantize_lm_head,
            fp8_kv_cache=config.kv_cache_dtype == "fp8",
            integer_bits=INTEGER_BITS.get(config.quantization, 0),
        )
        try:
            describe_model(model).check_ranks(tp)
        except ModelError:
            break
        need = needs(model, layout)
        listed = _filled(listed, need, tp, memory)
        if listed.fits:
            break
    on_gpus = "float16" if model.own_dtype == "float16" else "bfloat16"
    weights = model.format_name or (on_gpus if machine.gpus else "float32")
    if config.quantization in INTEGER_BITS:
        weights = config.quantization
    return msgspec.structs.replace(listed, dtype=weights)


def checked(listed: Listed) -> Listed:
    """Return `listed`, or a refusal if a file is missing or damaged."""
    folder = Path(listed.folder)
    try:
        if not listed.refusal:
            model = read_model_config(folder)
            check_files(folder, model, describe_model(model).tensors())
    except (ModelError, OSError) as error:
        return _refused(listed, error)
    return listed


def _refused(listed: Listed, error: ModelError | OSError) -> Listed:
    text = str(error)
    if isinstance(error, OSError):
        text = f"{error.filename} can't be read: {error.strerror}"
    return Listed(model=listed.model, folder=listed.folder, refusal=text)


def _check_integers(model: ModelConfig, config: Config, machine: Machine) -> None:
    """Raise ModelError for integers that the worker refuses."""
    if config.quantization not in INTEGER_BITS:
        return
    if machine.gpus:
        raise ModelError(f"quantization: got {config.quantization} on GPUs, expected none or fp8")
    if model.weight_format:
        kind = model.format_name
        raise ModelError(f"quantization: got {config.quantization}, expected none for {kind}")


def _filled(listed: Listed, need: Needs, tp: int, memory: float) -> Listed:
    return msgspec.structs.replace(
        listed,
        tp=tp,
        fits=need.with_context(CONTEXT) <= memory,
        weight_bytes=need.weights,
        kv_bytes_per_token=need.kv_per_token,
        kv_bytes_of_32k=need.kv_per_token * CONTEXT,
        state_bytes=need.state,
        needed_bytes=need.with_context(CONTEXT),
        available_bytes=int(memory),
        max_tokens=need.num_tokens(memory),
    )


def as_text(models: list[Listed], machine: Machine) -> str:
    """Return a table for people."""
    gpus = f"{len(machine.gpus)} GPUs of {_size(min(machine.gpus, default=0))}"
    head = f"{gpus if machine.gpus else 'no GPU'}, RAM of {_size(machine.ram)}"
    if not models:
        return f"{head}; no model in the cache: `launch all --model Qwen/Qwen3-0.6B` downloads one"
    columns = ["MODEL", "WEIGHTS", "DTYPE", "KV/TOKEN", "KV OF 32K", "STATE", "NEEDS", "FITS"]
    rows = [columns, *(_row(listed) for listed in models if not listed.refusal)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    refused = [f"{listed.model}: {_short(listed)}" for listed in models if listed.refusal]
    return "\n".join([head, "", *lines, *([""] if refused else []), *refused])


def _row(listed: Listed) -> list[str]:
    fits = f"--tp {listed.tp}, {listed.max_tokens:,} tokens" if listed.fits else "no"
    kv_sizes = listed.kv_bytes_per_token, listed.kv_bytes_of_32k
    sizes = map(_size, (*kv_sizes, listed.state_bytes, listed.needed_bytes))
    return [listed.model, _size(listed.weight_bytes), listed.dtype, *sizes, fits]


def _short(listed: Listed) -> str:
    """Return the refusal without the folder, which is part of the name."""
    return re.sub(rf"^{re.escape(listed.folder)}(/config\.json)?:? ", "", listed.refusal)


def _size(num_bytes: float) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20)):
        if num_bytes >= 1 << power:
            return f"{num_bytes / (1 << power):.1f} {unit}"
    return f"{num_bytes / 1024:.0f} KiB"


def needs(model: ModelConfig, layout: Layout) -> Needs:
    """Return the needs of each worker, with the default limits of a step."""
    number_bytes, scale_bytes = (1, 4) if layout.fp8_kv_cache else (layout.element_bytes, 0)
    architecture, state_tokens = describe_model(model), 0
    kv_per_token = architecture.token_bytes(layout.ranks, number_bytes, scale_bytes)
    if architecture.state_layers:
        _, kv_heads = architecture.heads
        token_bytes = kv_heads.units_of_rank(layout.ranks) * kv_heads.unit_size * number_bytes
        packing = architecture.pack_states(layout.ranks, BLOCK_SIZE * token_bytes)
        state_tokens = packing.num_blocks * BLOCK_SIZE
    return Needs(
        weights=weight_bytes(model, layout),
        kv_per_token=kv_per_token,
        step=_step_bytes(model, layout),
        start=_start_bytes(model, layout) if layout.integer_bits else 0,
        state=state_tokens * kv_per_token,
    )


def weight_bytes(model: ModelConfig, layout: Layout) -> int:
    """Return the bytes of a rank's weights."""
    architecture, weight_format = describe_model(model), model.weight_format
    num_bits = sum(
        prod(weight.shape_of_rank(layout.ranks)) * _num_bits(layout, layer, weight, weight_format)
        for layer in architecture.layers + architecture.mtp
        for weight in layer.weights
        if layer.kind not in OUTER
    )
    return int(num_bits / 8) + _outer_bytes(model, architecture, layout)


def _outer_bytes(model: ModelConfig, architecture: Architecture, layout: Layout) -> int:
    """Return the bytes of the embedding and the output layer."""
    layers = architecture.of_kind(*OUTER)
    number, size = prod(layers[0].weights[0].shape_of_rank(layout.ranks)), layout.element_bytes
    if layout.integer_bits and model.own_dtype == "bfloat16":
        size = 2
    # on CPUs the integers of the output layer are an additional copy
    is_float = bool(layout.integer_bits) or not layout.quantize_lm_head
    num_copies = len(layers) if is_float else 1
    return number * (num_copies * size + layout.quantize_lm_head)


def _num_bits(
    layout: Layout,
    layer: Layer,
    weight: Weight,
    weight_format: WeightFormat | None,
) -> float:
    """Return the bits of a number of a weight, including its share of a scale."""
    if not weight.is_matrix:
        return 8 * layout.element_bytes
    if layout.integer_bits:
        return layout.integer_bits + SCALE_BITS / INTEGER_GROUP
    if weight_format:
        # weights with the same inputs are joined; those of experts have one format
        joined = (
            next(other.names()).removesuffix(".weight")
            for other in layer.weights
            if other.is_matrix and (weight.experts or other.dim == weight.dim)
        )
        weight_format = weight_format.of(joined)
    columns = weight.shape_of_rank(layout.ranks)[-1]
    if weight_format and columns != weight.shape[-1]:
        weight_format = weight_format.after_cut(columns=columns)
    in_torch = weight.experts or layer.kind == "shared expert" or weight.name.startswith("mtp.")
    if weight_format is None:
        return 8 * layout.element_bytes
    is_kept = layout.on_gpus or weight_format.is_fp8 or not (in_torch or weight_format.act_order)
    if not is_kept:
        return 8 * layout.element_bytes
    scales = SCALE_BITS if layout.on_gpus else 2 * SCALE_BITS
    group = weight_format.group_size
    return weight_format.bits + (scales / group if group else 0)


def _start_bytes(model: ModelConfig, layout: Layout) -> int:
    """Return the bytes of all weights in float32, and of a matrix while it becomes integers."""
    largest = 2 * model.intermediate_size // layout.tp * model.hidden_size
    floats = layout._replace(integer_bits=0, quantize_lm_head=False)
    return weight_bytes(model, floats) + TEMPORARIES * largest * floats.element_bytes


def _step_bytes(model: ModelConfig, layout: Layout) -> int:
    """Return an estimate for the largest step: its activations, and the sampler's logits.

    On GPUs the estimate is doubled, for the CUDA graphs' pool and for eager steps.
    """
    architecture = describe_model(model)
    inner = model.intermediate_size
    if architecture.of_kind("mlp", "experts")[-1].kind == "experts":
        inner = model.moe_intermediate_size * model.num_experts_per_tok
    features = max(
        sum(weight.shape[0] for weight in layer.weights if weight.is_matrix and weight.dim == 0)
        for layer in architecture.of_kind("attention", "delta")
    )
    per_token = 4 * model.hidden_size + (3 * inner + 2 * features) // layout.tp
    step = DEFAULTS.max_num_batched_tokens * per_token * layout.element_bytes
    num_logits = architecture.of_kind("embedding")[0].weights[0].shape_of_rank(layout.ranks)[0]
    step += 2 * DEFAULTS.max_num_seqs * num_logits * 4
    rope = model.rope.num_positions * model.rotary_dim * 4
    if model.is_packed:  # the largest matrix, which is dequantized for many rows
        step += 4 * model.hidden_size * model.intermediate_size // layout.tp
    return rope + (2 * step + GPU_CONTEXT_BYTES if layout.on_gpus else step)
