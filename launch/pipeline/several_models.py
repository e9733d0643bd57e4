"""Options of several models.

An option after a `--model` belongs to that model. An option before the first `--model` belongs to
every model. Options of the pipeline (`--http-port`) belong to the pipeline wherever they stand.
"""

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.hub import resolve
from penstock.launch.pipeline.options import given_options
from penstock.launch.pipeline.procfile import kind_of
from penstock.protocol.config import MODEL_OPTIONS, Config


class NextModel(argparse.Action):
    """Action of `--model`, which begins the options of a model."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        before = _model_options(namespace)
        for field in before:
            delattr(namespace, field)
        namespace.before = [*getattr(namespace, "before", []), before]
        setattr(namespace, self.dest, values)


def _model_options(arguments: argparse.Namespace) -> dict[str, Any]:
    given = given_options(arguments, Config)
    return {option: value for option, value in given.items() if option in MODEL_OPTIONS}


def options_by_model(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the given options of each model, including those of the pipeline.

    Raises LaunchError for a model without `--model` next to other models.
    """
    before: list[dict[str, Any]] = getattr(arguments, "before", [])
    if (model := getattr(arguments, "positional_model", None)) is not None:
        if before:
            raise LaunchError(
                f"MODEL: got {model!r} and --model {arguments.model}, expected one of them; "
                "several models are --model A --model B"
            )
        arguments.model = model
    common, *own = [*before, _model_options(arguments)]
    given = given_options(arguments, Config)
    pipeline = {field: given[field] for field in given if field not in MODEL_OPTIONS}
    return [pipeline | common | options for options in own or [{}]]


def config_of(models: Sequence[dict[str, Any]]) -> Config:
    """Return the configuration of a pipeline with several models. Raises LaunchError."""
    if models[0].get("backend") == "ray":
        raise LaunchError(f"--model: got {len(models)}, expected one with --backend ray")
    configs = [Config(**resolve(options)) for options in models]
    groups = [model.group for model in configs]
    names = [name for model in configs for name in model.model_names]
    for model, group in zip(configs, groups, strict=True):
        is_shared = any(names.count(name) > 1 for name in model.model_names)
        if not group or groups.count(group) > 1 or is_shared:
            raise LaunchError(
                f"--served-model-name: got {' and '.join(map(repr, model.model_names))}, expected "
                "names of its own for each model, also without what is before a slash"
            )
    return msgspec.structs.replace(configs[0], models=tuple(configs))


def check_names(config: Config, kinds: Iterable[str]) -> None:
    """Raise LaunchError for a name that breaks lines or quotes, or that also names processes.

    kinds: kinds of processes in the procfile.
    """
    words = {"all", *kinds}
    for model in config.by_model():
        for name in model.model_names:
            if not name.isprintable() or set(name) & set("\"'"):
                raise LaunchError(
                    f"--served-model-name: got {name!r}, expected a name without control "
                    "characters and quotes"
                )
        if model.prefix and kind_of(model.group) in words:
            raise LaunchError(
                f"--served-model-name: got {model.model_name!r}, expected a name other than "
                f"{', '.join(sorted(words))}, which commands take for processes"
            )
