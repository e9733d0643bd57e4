"""Models that are not yet folders: names on the Hugging Face Hub, and GGUF files."""

import difflib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash
from msgspec import Struct

from penstock.launch.pipeline.errors import LaunchError
from penstock.protocol.checkpoint import ModelError
from penstock.protocol.config import HYBRID_DEMO

DOWNLOADER = "penstock.launch.pipeline.hub_download"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


class Downloaded(Struct):
    """Result of the downloader process."""

    folder: str = ""
    error: str = ""  # error message; empty if the folder was found


class HubModel(NamedTuple):
    """Repository of the Hub."""

    name: str  # `Qwen/Qwen3-8B`
    revision: str = ""  # branch, tag or commit; empty: the main branch

    def folder(self, *, weights: bool = True) -> Path:
        """Return the snapshot in the cache, after downloading missing files.

        weights: also download safetensors, not only the JSON files. The downloader is a separate
        process. Ctrl-C ends it at once, and it ends with this process. Raises LaunchError.
        """
        words = [self.name, self.revision, "weights" if weights else "config"]
        with subprocess.Popen(
            [sys.executable, "-P", "-m", DOWNLOADER, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            try:
                output = process.stdout.read() if process.stdout else b""
            except BaseException:
                process.kill()
                raise
        try:
            result = msgspec.json.decode(output, type=Downloaded)
        except msgspec.DecodeError:
            code = process.returncode
            raise LaunchError(f"--model: the download of {self.name} ended with {code}") from None
        if result.error:
            raise LaunchError(result.error)
        return Path(result.folder)


def hub_model(options: dict[str, Any]) -> HubModel | None:
    """Return the repository named by `model`; None for a folder, which wins, or a demo model.

    Raises LaunchError if `model` is neither, and for a `revision` without a repository.
    """
    model, revision = options.get("model", ""), options.get("revision", "")
    is_there = os.path.exists(model)  # noqa: PTH110  Path.exists raises errors, such as EACCES
    if _NAME.fullmatch(model) and not is_there:
        return HubModel(model, revision)
    if revision:
        raise LaunchError(
            f"--revision: got {revision!r}, expected none for the folder {model or 'of the demo'}; "
            "it is for a name on the Hugging Face Hub"
        )
    if model and model != HYBRID_DEMO and not is_there:
        raise LaunchError(
            f"--model: got {model!r}, expected an existing folder or GGUF file, or a name on the "
            f"Hugging Face Hub such as Qwen/Qwen3-8B{near_folder(model)}"
        )
    return None


def resolve(options: dict[str, Any], *, weights: bool = True) -> dict[str, Any]:
    """Return the options of a pipeline with a folder as `model`. Raises LaunchError.

    The name on the Hub becomes the name of the model over HTTP, as in vLLM. On Ray every node
    resolves the name itself, so a caller of `launch all` passes the name on.
    """
    source = hub_model(options)
    if source is None:
        model = options.get("model")
        if model and model.lower().endswith(".gguf") and Path(model).is_file():
            folder = _folder_of_gguf(Path(model))
            return {"served_model_name": Path(model).stem} | options | {"model": str(folder)}
        if not model or (model == HYBRID_DEMO and not Path(model).exists()):
            return options
        return options | {"model": str(Path(model).absolute())}
    if options.get("backend") == "ray" and weights:
        return options
    rest = {field: value for field, value in options.items() if field != "revision"}
    folder = source.folder(weights=weights)
    return {"served_model_name": source.name} | rest | {"model": str(folder)}


def _folder_of_gguf(path: Path) -> Path:
    """Return the checkpoint of a GGUF file, which is made at first use.

    A GGUF file with another size or modification time is another file. Raises LaunchError.
    """
    try:
        from penstock.launch.gguf import convert
    except ImportError as error:
        reason = "GGUF files need the package gguf; install penstock-llm[gguf]"
        raise LaunchError(f"--model: {reason}") from error
    try:
        folder = _cache() / _key(path)
    except RuntimeError as error:  # a user without a home folder
        raise LaunchError(f"--model: {path} can't be converted: {error} Set HOME") from error
    if folder.exists():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            whole = Path(made) / "whole"
            whole.mkdir()
            convert(path, whole)
            whole.rename(folder)
    except ModelError as error:
        raise LaunchError(f"--model: {error}") from error
    except OSError as error:
        if folder.exists():  # another process has made it
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


def near_folder(model: str) -> str:
    """Return a hint about a folder with a similar name, or about a broken link."""
    path = Path(model)
    try:
        if path.is_symlink():
            return " (this is a symbolic link that leads nowhere)"
        folders = [child.name for child in path.parent.iterdir() if child.is_dir()]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, folders, n=1)
    return f" (did you mean the folder {str(path.parent / near[0])!r}?)" if near else ""
