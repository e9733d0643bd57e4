"""The pipeline that a command measures or disturbs: a running one, or one of its own."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from penstock.launch.pipeline.ephemeral_pipeline import private_pipeline
from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.hub import hub_model, resolve
from penstock.launch.pipeline.options import as_flags, flag
from penstock.launch.pipeline.run_folder import running_config
from penstock.protocol.checkpoint import ModelError, read_model_config
from penstock.protocol.config import Config


@contextlib.contextmanager
def target(
    options: dict[str, Any], prefix: str, defaults: dict[str, Any], *flags: str
) -> Iterator[Config]:
    """Yield the running pipeline of `options["name"]`, or one that ends with the block.

    options: as given; prefix: of the name of a pipeline that is started; defaults: its options
    where none are given; flags: further ones of `launch all`. Raises LaunchError for options that
    can't be.
    """
    options = dict(options)
    if name := options.pop("name", None):
        check_no_options(options)
        yield running_config(name)
        return
    name, options = f"{prefix}-{os.getpid()}", defaults | resolve(options)
    if hub_model(options) is None:
        vocab_size(Config(**options))  # a wrong --model is one sentence, here
    with private_pipeline(name, *as_flags(options), *flags):
        yield running_config(name)


def check_no_options(options: dict[str, Any]) -> None:
    """Raise LaunchError if there is an option: a running pipeline takes none."""
    if options:
        raise LaunchError(f"{flag(next(iter(options)))} is for a pipeline that is yet to start")


def vocab_size(config: Config) -> int:
    """Return the size of the model's vocabulary. Raises LaunchError."""
    try:
        return read_model_config(config.model_folder).vocab_size
    except ModelError as error:
        raise LaunchError(f"--model: {error}") from error
