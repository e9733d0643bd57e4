"""The API key of HTTP clients; every user of a machine can read the command lines on it."""

import os
import sys
from collections.abc import Sequence

from penstock.launch.pipeline.errors import LaunchError
from penstock.protocol.config import API_KEY_VARIABLE, Config, with_api_key

_FLAG = "--api-key"


def hide_api_key() -> None:
    """Restart this program, in this process, with `--api-key` moved to its environment.

    Return if the command line does not contain a key.
    """
    words, key = without_key(sys.orig_argv)
    if key is not None:
        sys.stdout.flush()
        os.execve(sys.executable, words, os.environ | {API_KEY_VARIABLE: key})  # noqa: S606


def without_key(words: Sequence[str]) -> tuple[list[str], str | None]:
    """Return a command line without `--api-key`, and the value of the last such option."""
    kept: list[str] = []
    key = None
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name == _FLAG:
            key = value if equals else next(rest, "")
        else:
            kept.append(word)
    return kept, key


def read_api_key(config: Config) -> Config:
    """Return the result of `with_api_key`. Raises LaunchError."""
    try:
        return with_api_key(config)
    except OSError as error:
        path, reason = config.api_key_file, error.strerror
        raise LaunchError(f"--api-key-file: {path} can't be read: {reason}") from error
    except ValueError as error:
        raise LaunchError(f"--api-key-file: {error}") from error
