"""The pipeline that is measured: one that runs already, or one of the benchmark's own."""

import contextlib
import os
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from penstock.launch.pipeline.ephemeral_pipeline import private_pipeline
from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.options import as_flags, flag, given_options
from penstock.launch.pipeline.run_folder import model_name, running_config
from penstock.protocol.checkpoint import ModelError, read_model_config
from penstock.protocol.config import Config

OWN_DEFAULTS: dict[str, Any] = {
    "http": 0,
    "enable_prefix_caching": False,
    "log_level": "warning",
}


class Target(Struct):
    """Where the requests go."""

    endpoint: str
    model: str
    vocab_size: int
    config: Config | None = None
    """None where only endpoint and model are known"""
    ready_seconds: float | None = None
    """from the start to `ready`, of a pipeline of the benchmark's own"""
    keys: str = ""
    """folder of keys, if the gateway has some"""


@contextlib.contextmanager
def target(arguments: Namespace) -> Iterator[Target]:
    """Yield a running pipeline if `name` or `endpoint` is given, else one that ends with the block.

    Raises LaunchError for options that can't be.
    """
    options = given_options(arguments, Config)
    name, endpoint = options.pop("name", None), options.pop("endpoint")
    if name or endpoint:
        yield _running(name, endpoint, options)
        return
    _vocab_size(Config(**options))  # a wrong --model is one sentence, here
    options = OWN_DEFAULTS | options
    start, name = time.perf_counter(), f"bench-{os.getpid()}"
    with private_pipeline(name, *as_flags(options)) as endpoint:
        seconds = time.perf_counter() - start
        yield _target(Config(name=name, endpoint=endpoint, **options), seconds)


def _running(name: str | None, endpoint: str | None, options: dict[str, Any]) -> Target:
    model, keys = options.pop("model", None), options.pop("curve_keys", "")
    if options:
        raise LaunchError(f"{flag(next(iter(options)))} is for a pipeline that is yet to start")
    if name:
        config = running_config(name)
        return _target(msgspec.structs.replace(config, curve_keys=keys or config.curve_keys))
    if model is None:
        raise LaunchError("--endpoint needs --model, for the size of its vocabulary")
    found = _target(Config(endpoint=str(endpoint), model=model, curve_keys=keys))
    found.config = None
    return found


def _target(config: Config, ready_seconds: float | None = None) -> Target:
    where = config.endpoint, model_name(config), _vocab_size(config)
    return Target(*where, config, ready_seconds, config.curve_keys)


def is_running(name: str) -> bool:
    """Return whether a pipeline of this name runs."""
    try:
        running_config(name)
    except LaunchError:
        return False
    return True


def _vocab_size(config: Config) -> int:
    try:
        return read_model_config(config.model_folder).vocab_size
    except ModelError as error:
        raise LaunchError(f"--model: {error}") from error
