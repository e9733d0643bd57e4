"""The key of HTTP clients: everybody on a machine can read the command lines of its processes."""

import os
import sys
from collections.abc import Sequence

from penstock.launch.errors import LaunchError
from penstock.protocol.config import Config
from penstock.protocol.environment import API_KEY_VARIABLE, with_api_key

_FLAG = "--api-key"


def hide_api_key() -> None:
    """Starts this program again, in this process, with the value of `--api-key` in its environment
    instead of its command line. Returns where the command line has none."""
    words, key = without_key(sys.orig_argv)
    if key is not None:
        sys.stdout.flush()
        os.execve(sys.executable, words, os.environ | {API_KEY_VARIABLE: key})  # noqa: S606


def without_key(words: Sequence[str]) -> tuple[list[str], str | None]:
    """A command line without `--api-key`, and its value, of several the last."""
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
    """As `with_api_key`. Raises LaunchError."""
    try:
        return with_api_key(config)
    except OSError as error:
        path, reason = config.api_key_file, error.strerror
        raise LaunchError(f"--api-key-file: {path} can't be read: {reason}") from error
    except ValueError as error:
        raise LaunchError(f"--api-key-file: {error}") from error
