"""Checkpoints made of GGUF files, kept in the user's cache."""

import os
import tempfile
from pathlib import Path

import xxhash

from penstock.launch.pipeline.errors import LaunchError


def is_gguf(model: str) -> bool:
    """Return whether `--model` names a GGUF file."""
    return model.endswith(".gguf") and Path(model).is_file()


def folder_of(path: Path) -> Path:
    """Return the checkpoint of a GGUF file, which is made at the first time.

    A file of another size or time of change is another file. Raises LaunchError, ModelError.
    """
    try:
        from penstock.launch.pipeline.gguf_checkpoint import convert
    except ImportError as error:
        reason = "GGUF files need the package gguf; install penstock[gguf]"
        raise LaunchError(f"--model: {reason}") from error
    folder = _cache() / _key(path)
    if folder.exists():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            whole = Path(made) / "whole"
            whole.mkdir()
            convert(path, whole)
            whole.rename(folder)
    except OSError as error:
        if folder.exists():  # another process was faster
            return folder
        raise LaunchError(f"--model: {path} can't be converted: {error}") from error
    return folder


def _cache() -> Path:
    parent = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(parent) / "penstock" / "gguf"


def _key(path: Path) -> str:
    facts = path.stat()
    text = f"{path.resolve()} {facts.st_size} {facts.st_mtime_ns}"
    return f"{path.stem}-{xxhash.xxh64_hexdigest(text.encode())}"
