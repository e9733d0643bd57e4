"""`launch gateway`, `launch worker` and others: one more process of a running pipeline."""

import os
from argparse import ArgumentParser, Namespace

from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.options import add_name, name_of
from penstock.launch.pipeline.procfile import OF_MODEL, read_procfile, shell_line
from penstock.launch.pipeline.run_folder import environment, running_config


def add_arguments(command: ArgumentParser) -> None:
    """Add the arguments."""
    command.set_defaults(run=_run, kind=command.prog.split()[-1])
    add_name(command)


def _run(arguments: Namespace) -> int:
    config = running_config(name_of(arguments))
    if len(config.by_model()) > 1 and arguments.kind in OF_MODEL:
        text = f"{arguments.kind}: got a pipeline of several models, expected one"
        raise LaunchError(f"{text}; `launch scale` adds tokenizers and detokenizers of a model")
    line = shell_line(read_procfile()[arguments.kind])
    os.execvpe("sh", ["sh", "-c", line], environment(config))  # noqa: S606
