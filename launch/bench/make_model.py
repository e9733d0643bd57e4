"""`launch bench make-model`: a checkpoint of a published shape with random weights."""

import os
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from penstock.launch.pipeline.errors import LaunchError

SIZES = ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B")
FORMATS = ("fp8", "awq", "gptq")
MODULE = "penstock.models.bench.random_checkpoint"
"""has the shapes; it needs torch, which `launch` does not import"""


def add_make_model(command: ArgumentParser) -> None:
    """Add the arguments."""
    command.set_defaults(run=_make_model)
    command.add_argument("size", choices=SIZES, metavar="SIZE", help=", ".join(SIZES))
    command.add_argument("folder", type=Path, metavar="FOLDER", help="a new or empty one")
    text = "of the weights: bfloat16, float16 or float32 (default: %(default)s)"
    dtypes = ("bfloat16", "float16", "float32")
    command.add_argument("--dtype", choices=dtypes, default=dtypes[0], metavar="DTYPE", help=text)
    text = "format of the layers' products: fp8 (as Qwen3-…-FP8), awq, or gptq (default: 16 bits)"
    command.add_argument("--quantization", choices=FORMATS, metavar="FORMAT", help=text)
    command.add_argument("--fp8", action="store_true", help="short for --quantization fp8")
    text = "layers, where not as many as published"
    command.add_argument("--layers", type=int, metavar="N", help=text)


def _make_model(arguments: Namespace) -> int:
    folder: Path = arguments.folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise LaunchError(f"{folder} exists and is not an empty folder; give another name")
    if arguments.layers is not None and arguments.layers < 1:
        raise LaunchError(f"--layers: got {arguments.layers}, expected 1 or more")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"FOLDER: {folder} can't be made: {error.strerror}") from error
    quantization = "fp8" if arguments.fp8 else arguments.quantization
    flags = ["--quantization", quantization] if quantization else []
    if arguments.layers:
        flags += ["--layers", str(arguments.layers)]
    words = [arguments.size, str(folder), "--dtype", arguments.dtype, *flags]
    os.execv(sys.executable, [sys.executable, "-P", "-m", MODULE, *words])  # noqa: S606
