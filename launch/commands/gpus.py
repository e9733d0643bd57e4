"""GPUs and memory of this machine, without torch."""

import contextlib
import ctypes
import os
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import psutil

from penstock.launch.pipeline.errors import LaunchError
from penstock.protocol.config import Config, check_own_folder

QUERY = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
TIMEOUT = 30  # seconds, since a driver may have to load


class Gpu(NamedTuple):
    """A GPU of this machine."""

    name: str
    num_bytes: int


def check_gpus(config: Config) -> None:
    """Raise LaunchError if `--device cuda` can't work: torch without CUDA, or too few GPUs."""
    with contextlib.suppress(PackageNotFoundError):
        if (torch := version("torch")).endswith("+cpu"):
            raise LaunchError(
                f"--device cuda: torch {torch} is built without CUDA; install a CUDA build, or "
                "give --device cpu"
            )
    needed, found = config.tp * config.dp, num_gpus()
    if found is not None and found < needed:
        raise LaunchError(
            f"--device cuda: --tp {config.tp} and --dp {config.dp} need {needed} GPUs, and this "
            f"process has {found}; `nvidia-smi` lists the machine's, --device cpu needs none"
        )


def check_tiers(config: Config) -> None:
    """Raise LaunchError if the tiers of the KV cache can't work."""
    gib, number = config.kv_offload_gib, config.tp * config.dp
    if config.kv_offload_folder and not gib:
        raise LaunchError(
            f"--kv-offload-folder: got {config.kv_offload_folder!r} without --kv-offload-gib, "
            "expected both"
        )
    if config.kv_offload_folder and config.backend == "local":
        try:
            with contextlib.suppress(FileNotFoundError):  # workers create the folder
                check_own_folder(Path(config.kv_offload_folder), instead="give a new folder")
        except OSError as error:
            raise LaunchError(f"--kv-offload-folder: {error}") from error
    if gib and not config.enable_prefix_caching:
        raise LaunchError(
            f"--kv-offload-gib: got {gib:g} with --no-enable-prefix-caching, expected one of them"
        )
    available = _available_bytes() / 2**30
    if config.backend == "local" and gib * number > available:
        raise LaunchError(
            f"--kv-offload-gib: got {gib:g} for each of {number} workers, expected less than "
            f"{available / number:.2g}: {available:.2g} GiB of memory are available"
        )


def _available_bytes() -> int:
    """Return the available memory of this machine, up to its container's limit."""
    available: int = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # no container, or a container without a limit
        available = min(available, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return available


def gpus_by_model(config: Config) -> dict[str, str]:
    """Return the CUDA_VISIBLE_DEVICES of each model's processes; empty if none must be set.

    Each model has separate GPUs. If too few are left, a model with --kv-cache-gib shares the GPUs
    of earlier models with this option. Raises LaunchError.
    """
    models = config.by_model()
    if len(models) == 1 or (number_here := num_gpus()) == 0:
        return {}
    needed = {model.group: model.tp * model.dp for model in models if model.device != "cpu"}
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in given.split(",") if name.strip()]
    free = names or [str(index) for index in range(number_here or sum(needed.values()))]
    free = free[:number_here]
    shared: list[str] = []
    found: dict[str, str] = {}
    for model in models:
        number = needed.get(model.group, 0)
        chosen = (free + shared if model.kv_cache_gib else free)[:number]
        if len(chosen) < number:
            raise LaunchError(
                f"{model.model_name}: --tp {model.tp} and --dp {model.dp} need {number} GPUs, and "
                f"the models before it leave {len(free)}; models share GPUs if each has "
                "--kv-cache-gib, and --device cpu needs none"
            )
        free = free[number:]
        shared = [*shared, *(set(chosen) - set(shared))] if model.kv_cache_gib else shared
        found[model.group] = ",".join(chosen)
    return found


def num_gpus() -> int | None:
    """Return the maximum number of GPUs visible to a process here; None if unknown."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = (
        None if visible is None else len([index for index in visible.split(",") if index.strip()])
    )
    if chosen is not None and (chosen == 0 or "MIG-" in (visible or "")):
        return chosen  # one physical GPU may have several of these
    physical = physical_gpus()
    number = None if physical is None else len(physical)
    return number if chosen is None or number is None else min(chosen, number)


def physical_gpus() -> list[Gpu] | None:
    """Return the GPUs of this machine; None if a driver exists but does not answer."""
    try:
        found = subprocess.run(QUERY, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return _without_answer()
    if found.returncode:
        return [] if "No devices" in found.stdout else _without_answer()
    lines = (line.rpartition(", ") for line in found.stdout.splitlines())
    # a GPU that shares the machine's memory does not report a number
    return [Gpu(name, int(size) << 20 if size.isdecimal() else 0) for name, _, size in lines]


def _without_answer() -> list[Gpu] | None:
    """Return None if a driver exists, otherwise an empty list."""
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        return None
    return []
