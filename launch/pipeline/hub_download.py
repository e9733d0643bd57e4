"""The downloader: a process that downloads a model of the Hugging Face Hub into the cache.

Unsupported models are refused before their weights are downloaded. An interrupted download
continues where it stopped.
"""

import contextlib
import errno
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import msgspec
from huggingface_hub import HfApi, constants, get_token, snapshot_download, utils
from huggingface_hub import errors as hub

from penstock.launch.pipeline.errors import first_line
from penstock.launch.pipeline.hub import Downloaded, near_folder
from penstock.protocol.checkpoint import ModelError, read_model_config, without_config
from penstock.protocol.checkpoint_files import weight_files

SMALL_FILES = [
    *("config.json", "generation_config.json", "model.safetensors.index.json"),
    *("modules.json", "1_Pooling/config.json"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json"),
    "additional_chat_templates/*.jinja",
]
FULL = (errno.ENOSPC, errno.EDQUOT)


def download(name: str, revision: str, *, weights: bool) -> Path:
    """Return the folder of a complete snapshot. Raises ModelError with a sentence."""
    utils.disable_progress_bars()
    folder = _snapshot(name, revision, SMALL_FILES)
    if not (folder / "config.json").exists() and not constants.HF_HUB_OFFLINE:
        with _sentences(name, revision):
            files = HfApi(constants.ENDPOINT).list_repo_files(name, revision=folder.name)
        raise ModelError(without_config(name, files))
    read_model_config(folder)
    if weights:
        files = weight_files(folder)
        if not all((folder / file).exists() for file in files):
            if not constants.HF_HUB_OFFLINE:
                print(f"launch: downloading {name} to {folder}", file=sys.stderr)
            if sys.stderr.isatty():
                utils.enable_progress_bars()
            # the commit, since the branch may move in the meantime
            _snapshot(name, folder.name, files)
        if missing := [file for file in files if not (folder / file).exists()]:
            raise ModelError(
                f"--model: got {name!r}, whose copy in the cache {folder} lacks {missing[0]}; "
                f"{_to_complete()}"
            )
    return folder


def _snapshot(name: str, revision: str, files: list[str]) -> Path:
    with _sentences(name, revision):
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=files))


@contextlib.contextmanager
def _sentences(name: str, revision: str) -> Iterator[None]:
    """Raise ModelError with a sentence for an exception of huggingface_hub."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, hub.HTTPError, hub.XetDownloadError) as error:
        raise ModelError(_sentence(error, name, revision)) from error


def _sentence(error: Exception, name: str, revision: str) -> str:
    page, got = f"{constants.ENDPOINT}/{name}", f"--model: got {name!r}"
    match error:
        case hub.GatedRepoError():
            has = "the token's account has no access" if get_token() else "it needs a token"
            return (
                f"{got}, a gated repository, and {has}; accept its terms at {page}, and set "
                "HF_TOKEN to a token of that account, or run `hf auth login`"
            )
        case hub.RepositoryNotFoundError() | hub.HFValidationError():
            return (
                f"{got}, expected an existing folder or a repository of {constants.ENDPOINT}, and "
                "there is neither; check the spelling (a private repository needs HF_TOKEN)"
                f"{near_folder(name)}"
            )
        case hub.RevisionNotFoundError():
            return f"--revision: got {revision!r}, expected a branch, tag or commit of {page}"
        case hub.LocalEntryNotFoundError():
            why = first_line(error.__cause__ or error)
            reached = f"{constants.ENDPOINT} can't be reached ({why})"
            if constants.HF_HUB_OFFLINE:
                reached = "HF_HUB_OFFLINE is set"
            return (
                f"{got}: {reached}, and the cache {constants.HF_HUB_CACHE} has no complete copy of "
                f"it; {_to_complete()}{near_folder(name)}"
            )
        case hub.HfHubHTTPError() if error.response.status_code == 401:
            return f"{got}: {constants.ENDPOINT} refuses the token; correct or unset HF_TOKEN"
    if getattr(error, "errno", None) in FULL or "No space left" in str(error):
        return (
            f"{got}: no space is left for the cache {constants.HF_HUB_CACHE}; free some, or set "
            "HF_HOME to a folder on a larger disk. What was downloaded is kept"
        )
    if isinstance(error, OSError) and error.errno is not None:
        return (
            f"{got}: the cache {constants.HF_HUB_CACHE} can't be used ({error}); set HF_HOME to a "
            "folder that this user may write"
        )
    return f"{got}: the download failed ({first_line(error)}); run the command again to continue"


def _to_complete() -> str:
    first = "unset HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "check the network"
    return f"{first}, or give the folder of a checkpoint"


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def main() -> NoReturn:
    """Download the model and print the result as JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    warnings.filterwarnings("ignore", "Not enough free disk space")  # reported as a sentence
    utils.logging.set_verbosity_error()  # failures are reported as a sentence
    name, revision, what = sys.argv[1:]
    try:
        folder = download(name, revision, weights=what == "weights")
        result = Downloaded(folder=str(folder))
    except ModelError as error:
        text = str(error)
        result = Downloaded(error=text if text.startswith("--") else f"--model: {text}")
    sys.stdout.buffer.write(msgspec.json.encode(result))
    sys.stdout.flush()
    os._exit(0)  # threads of a failed download need not end


if __name__ == "__main__":
    main()
