"""The pipeline whose processes are killed: one that runs, or one of our own, and what it leaves."""

import contextlib
import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from penstock.launch.pipeline.ephemeral_pipeline import private_pipeline
from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.options import as_flags, flag, given_options
from penstock.launch.pipeline.run_folder import running_config
from penstock.protocol.checkpoint import ModelError, read_model_config
from penstock.protocol.config import Config, run_folder

OWN_DEFAULTS: dict[str, Any] = {"http": 0, "hang_timeout": 3.0, "log_level": "error"}
MAX_DEATHS = 1_000_000
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  looked at only


@contextlib.contextmanager
def target(arguments: Namespace) -> Iterator[Config]:
    """Yield the pipeline of `name`, or one that ends with the block.

    Raises LaunchError for options that can't be.
    """
    options = given_options(arguments, Config)
    name = options.pop("name", None)
    if name:
        if options:
            raise LaunchError(f"{flag(next(iter(options)))} is for a pipeline that is yet to start")
        yield running_config(name)
        return
    name, options = f"chaos-{os.getpid()}", OWN_DEFAULTS | options
    try:
        read_model_config(Config(**options).model_folder)
    except ModelError as error:
        raise LaunchError(f"--model: {error}") from error
    with private_pipeline(name, *as_flags(options), "--max-deaths", str(MAX_DEATHS)) as endpoint:
        yield Config(name=name, endpoint=endpoint, **options)


def shared_memory() -> set[str]:
    """Return the names of the files in /dev/shm."""
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.exists() else set()


def left_behind(name: str, processes: list[psutil.Process], shared_before: set[str]) -> list[str]:
    """Return what an ended pipeline has left. A GPU's memory goes with its processes."""
    folder = run_folder(name)
    return [
        *(f"process {process.pid}" for process in processes if process.is_running()),
        *([str(folder)] if folder.exists() else []),
        *(str(SHARED_MEMORY / name) for name in sorted(shared_memory() - shared_before)),
    ]
