"""The pipeline that is measured: one that runs already, or one of the benchmark's own."""

import contextlib
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.hub import resolve
from penstock.launch.pipeline.options import given_options
from penstock.launch.pipeline.run_folder import model_name
from penstock.launch.pipeline.target import check_no_options, target, vocab_size
from penstock.protocol.config import Config

OWN_DEFAULTS: dict[str, Any] = {
    "http": 0,
    "enable_prefix_caching": False,
    "log_level": "warning",
}


class Target(Struct):
    """The pipeline that gets the requests."""

    endpoint: str
    model: str
    vocab_size: int
    config: Config | None = None  # None where only endpoint and model are known
    # from the start to `ready`, of a pipeline of the benchmark's own
    ready_seconds: float | None = None
    keys: str = ""  # folder of keys, if the gateway has some


@contextlib.contextmanager
def measured(arguments: Namespace) -> Iterator[Target]:
    """Yield a running pipeline if `name` or `endpoint` is given, else one that ends with the block.

    Raises LaunchError for options that can't be.
    """
    options = given_options(arguments, Config)
    endpoint, start = options.pop("endpoint"), time.perf_counter()
    if not (endpoint or "name" in options):
        with target(options, "bench", OWN_DEFAULTS) as config:
            yield _target(config, time.perf_counter() - start)
        return
    model, keys = options.pop("model", None), options.pop("curve_keys", "")
    if "name" in options:
        with target(options, "bench", {}) as config:
            yield _target(msgspec.structs.replace(config, curve_keys=keys or config.curve_keys))
        return
    check_no_options(options)
    if model is None:
        raise LaunchError("--endpoint needs --model, for the size of its vocabulary")
    fields = resolve({"model": model}, weights=False)
    found = _target(Config(endpoint=endpoint, curve_keys=keys, **fields))
    found.config = None
    yield found


def _target(config: Config, ready_seconds: float | None = None) -> Target:
    where = config.endpoint, model_name(config), vocab_size(config)
    return Target(*where, config, ready_seconds, config.curve_keys)
