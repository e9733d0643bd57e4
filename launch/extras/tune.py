"""`launch tune`: measures a model's products on this machine's GPU, and stores the fastest."""

import subprocess
import sys
from argparse import ArgumentParser, Namespace

from penstock.launch.commands.gpus import num_gpus
from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.hub import resolve
from penstock.launch.pipeline.options import add_options, given_options
from penstock.models.architecture import Ranks, describe
from penstock.protocol.checkpoint import ModelConfig, ModelError, read_model_config
from penstock.protocol.config import Config

HEAD_DIM = 128  # head_dim of every published Qwen3 model


def add_arguments(command: ArgumentParser) -> None:
    """Add the arguments of `launch tune`."""
    command.set_defaults(run=_run)
    command.epilog = "Without --model, the products of the published dense models are measured."
    add_options(command, Config, ["model", "revision", "tp", "quantization"])


def _run(arguments: Namespace) -> int:
    if num_gpus() == 0:
        raise LaunchError("tune: got a machine without an NVIDIA GPU, expected one to measure")
    given = given_options(arguments, Config)
    options = [f"--dtype={'fp8' if given.get('quantization') == 'fp8' else 'bfloat16'}"]
    if given.get("model"):
        config = Config(**resolve(given, weights=False))
        try:
            model = read_model_config(config.model_folder, config.quantization)
            describe(model).check_ranks(config.tp)
        except ModelError as error:
            raise LaunchError(str(error)) from error
        options = layer_options(model, config.tp)
    command = [sys.executable, "-m", "penstock.kernels.bench.linear", "--cache", *options]
    return subprocess.run(command, check=False).returncode


def layer_options(model: ModelConfig, tp: int) -> list[str]:
    """Return the options of the measuring program for a rank's products. Raises LaunchError."""
    heads, kv_heads = describe(model).heads
    if kv_heads.unit_size != HEAD_DIM:
        raise LaunchError(
            f"tune: got a model with heads of {model.head_dim}, expected {HEAD_DIM}, as Qwen3 has; "
            "products of others run without tuning"
        )
    numbers = (axis.units_of_rank(Ranks(tp)) for axis in (heads, kv_heads))
    sizes = model.hidden_size, model.intermediate_size // tp, *numbers
    dtype = "fp8" if model.fp8 else "bfloat16"
    return ["--layer", *map(str, sizes), f"--tp={tp}", f"--dtype={dtype}"]
