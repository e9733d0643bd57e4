"""`launch all`: checks the options, then supervises the pipeline."""

import asyncio
import contextlib
import errno
import os
import socket
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zmq
from msgspec.structs import replace

from penstock.launch.commands.api_key import read_api_key
from penstock.launch.commands.gpus import check_gpus, check_tiers, gpus_by_model, num_gpus
from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.hub import HubModel, hub_model, resolve
from penstock.launch.pipeline.options import NextModel, add_options, flag, options_by_model
from penstock.launch.pipeline.procfile import (
    PROCFILE,
    check_open_files,
    kind_of,
    process_names,
    read_procfile,
)
from penstock.launch.pipeline.run_folder import (
    answers,
    base_url,
    claim,
    configs_of_others,
    control_endpoint,
    remove_socket,
    starting_alone,
)
from penstock.launch.supervisor.local import LocalProcesses
from penstock.launch.supervisor.processes import MakeProcesses
from penstock.launch.supervisor.supervisor import Supervisor
from penstock.models.architecture import describe
from penstock.protocol.checkpoint import ModelConfig, ModelError, read_model_config
from penstock.protocol.checkpoint_files import check_files, has_mtp
from penstock.protocol.client.connection import check_addresses
from penstock.protocol.client.session import ClientError
from penstock.protocol.config import (
    DEFAULT_CLIENT,
    OPTIONS,
    RUN_FOLDER_VARIABLES,
    Config,
    run_folder,
    write_config,
)
from penstock.protocol.tracing import check_tracing
from penstock.protocol.transport.context import (
    bind,
    check_reach,
    endpoints,
    is_loopback,
    secure_client,
    secure_server,
)
from penstock.protocol.transport.process import raise_descriptor_limit

WORKER = "penstock.services.worker"
MAX_PORTS = 100  # maximum ports that are tried


def add_arguments(command: ArgumentParser) -> None:
    """Add the arguments of `launch all`."""
    command.set_defaults(run=_run_all)
    text = "what to serve, as --model takes it"
    command.add_argument("positional_model", metavar="MODEL", nargs="?", help=text)
    add_options(command, Config, OPTIONS, actions={"model": NextModel})
    text = "what to run (default: penstock's own)"
    command.add_argument("--procfile", type=Path, default=PROCFILE, help=text)
    text = "deaths of one process within 60 s that stop the pipeline (default: 5)"
    command.add_argument("--max-deaths", type=int, default=5, help=text)


def _run_all(arguments: Namespace) -> int:
    models = options_by_model(arguments)
    fields, source = models[0], None
    if fields.get("curve_keys"):
        fields["curve_keys"] = str(Path(fields["curve_keys"]).absolute())
    if (endpoint := fields.get("endpoint", "")).startswith("ipc://") and "://@" not in endpoint:
        fields["endpoint"] = f"ipc://{Path(endpoint.removeprefix('ipc://')).absolute()}"
    if len(models) > 1:
        config = config_of(models)
    else:
        source = hub_model(fields)
        config = Config(**resolve(fields, weights=fields.get("backend") != "ray"))
        source = source and source._replace(revision=config.model_folder.name)
    decided = tuple(with_method(model) for model in config.models)
    config = with_method(replace(read_api_key(config), models=decided))
    max_deaths = arguments.max_deaths
    return start(config, arguments.procfile, max_deaths, source, addresses_to_choose(fields))


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
    return replace(configs[0], models=tuple(configs))


def with_method(config: Config) -> Config:
    """Return the configuration with a decision on `speculative_method: auto`."""
    if config.speculative_method != "auto":
        return config
    drafts = config.device != "cpu" and config.backend == "local" and has_mtp(config.model_folder)
    return replace(config, speculative_method="mtp" if drafts and num_gpus() else "none")


def addresses_to_choose(fields: Collection[str]) -> set[str]:
    """Return the address fields to be chosen automatically, because only a name was given."""
    return {"endpoint", "http_port"}.difference(fields) if "name" in fields else set()


def start(
    config: Config,
    procfile: Path,
    max_deaths: int,
    source: HubModel | None = None,
    chosen: Collection[str] = (),
) -> int:
    """Run the pipeline to its end and return the exit code.

    source: where nodes of a Ray cluster download the model from. chosen: address fields for which a
    free port is searched.
    """
    commands = read_procfile(procfile)
    check_names(config, commands)
    try:
        check_addresses(config.endpoint)
    except ClientError as error:
        raise LaunchError(str(error)) from None
    models = []
    for of_model in config.by_model():
        with _naming(of_model):
            models.append((of_model, _check_model(of_model)))
        report_few_spares(of_model)
    raise_descriptor_limit()
    check_open_files(len(process_names(config, commands)))
    with claim(config):
        _check_length(config)
        _check_security(config)
        check_http_reach(config)
        if config.backend == "local":
            config = checked_addresses(config, chosen)
        for of_model, model in models:
            with _naming(of_model):
                _check_files(of_model, model, commands)
        if config.backend == "ray":
            return _run_on_ray(source, config, commands, max_deaths)
        make_processes = partial(LocalProcesses, gpus=gpus_by_model(config))
        return _supervise(config, commands, max_deaths, make_processes)


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


def _run_on_ray(
    source: HubModel | None, config: Config, commands: dict[str, str], max_deaths: int
) -> int:
    try:
        from penstock.launch.ray.processes import on_cluster
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise LaunchError("--backend ray needs Ray: pip install 'penstock-llm[ray]'") from error
    with on_cluster(config, commands, source) as (make_processes, kinds_here):
        if "gateway" in kinds_here:
            check_endpoint(config.endpoint)
        if "http" in kinds_here:
            check_http_port(config)
        return _supervise(config, commands, max_deaths, make_processes)


def _supervise(
    config: Config, commands: dict[str, str], max_deaths: int, make_processes: MakeProcesses
) -> int:
    write_config(config)
    try:
        return asyncio.run(Supervisor(config, commands, max_deaths, make_processes).run())
    finally:
        remove_socket(config.endpoint)


@contextlib.contextmanager
def _naming(config: Config) -> Iterator[None]:
    """Prefix errors with the name of the model, if there are several models."""
    try:
        yield
    except LaunchError as error:
        name = f"{config.model_name}: " * bool(config.prefix)
        raise LaunchError(f"{name}{error}") from error


def _check_model(config: Config) -> ModelConfig:
    """Return the model. Raises LaunchError if it can't be served with its options."""
    if config.device == "cuda" and config.backend == "local":
        check_gpus(config)
    check_tiers(config)
    try:
        _ = config.template_defaults
    except msgspec.DecodeError as error:
        got = f"got {config.default_chat_template_kwargs!r}, expected a JSON map"
        raise LaunchError(f"--default-chat-template-kwargs: {got}: {error}") from error
    with _refusing_model():
        model = read_model_config(
            config.model_folder, config.quantization, config.speculative_method
        )
    try:
        describe(model).check_ranks(config.tp, config.enable_expert_parallel)
        model.context(config.max_model_len)
    except ModelError as error:  # `field: reason`
        field, _, reason = str(error).partition(":")
        raise LaunchError(f"{flag(field)}:{reason}") from error
    return model


def report_few_spares(config: Config) -> None:
    """Print a warning if spare workers are too few for a standby group."""
    if 0 < config.spare_workers < config.tp:
        print(
            f"launch: --spare-workers: got {config.spare_workers}, expected at least --tp "
            f"({config.tp}) for a standby group; fewer workers load the model after a death",
            file=sys.stderr,
        )


def _check_files(config: Config, model: ModelConfig, commands: dict[str, str]) -> None:
    """Raise LaunchError for a checkpoint with missing or damaged files.

    A stand-in for the worker reads no weights; other machines have separate files.
    """
    reads_weights = config.backend == "local" and WORKER in commands.get("worker", "")
    with _refusing_model():
        tensors = describe(model).tensors() if reads_weights else None
        check_files(config.model_folder, model, tensors)


@contextlib.contextmanager
def _refusing_model() -> Iterator[None]:
    """Raise LaunchError for a checkpoint that can't be served or read."""
    try:
        yield
    except ModelError as error:
        raise LaunchError(f"--model: {error}") from error
    except OSError as error:
        raise LaunchError(f"--model: {error.filename} can't be read: {error.strerror}") from error


def _check_length(config: Config) -> None:
    """Raise LaunchError if the run folder's path is too long for its sockets."""
    addresses = [control_endpoint(config.run_folder)]
    for model in config.by_model():
        addresses += endpoints(model, model.dp - 1)[1:]
    longest = max((path for path in addresses if "ipc://" in path), key=len).removeprefix("ipc://")
    if (size := len(bytes(Path(longest)))) > zmq.IPC_PATH_MAX_LEN:
        got = f"{longest} of {size} characters, expected up to {zmq.IPC_PATH_MAX_LEN}"
        raise LaunchError(f"{_variable(config)}: got socket path {got}; let it name a shorter path")


def _variable(config: Config) -> str:
    """Return the environment variable from which the run folder's path comes."""
    parent = run_folder(config.name).parents[1]
    given = {name: os.environ.get(name) for name in RUN_FOLDER_VARIABLES}
    named = (name for name, path in given.items() if path and Path(path).absolute() == parent)
    return next(named, RUN_FOLDER_VARIABLES[0])


def _check_security(config: Config) -> None:
    """Raise LaunchError if the gateway would refuse to bind, or has no keys."""
    try:
        check_reach(config)
        check_tracing(config)
        if config.curve_keys:
            with zmq.Context() as context, context.socket(zmq.ROUTER) as trial:
                secure_server(trial, Path(config.curve_keys))
                secure_client(trial, Path(config.curve_keys), DEFAULT_CLIENT)
    except ValueError as error:
        raise LaunchError(str(error)) from error


def checked_addresses(config: Config, chosen: Collection[str]) -> Config:
    """Check the addresses, write the configuration and return it.

    chosen: address fields that get the first free port from their own upward, of MAX_PORTS. Raises
    LaunchError if an address is in use.
    """
    free, numbers = config, range(MAX_PORTS)
    with starting_alone(config):
        others = list(configs_of_others(config))  # these may not listen yet
        if "endpoint" in chosen:
            host, _, port = config.endpoint.rpartition(":")
            taken = {other.endpoint for other in others}
            endpoints = (f"{host}:{int(port) + number}" for number in numbers)
            new = (replace(free, endpoint=new) for new in endpoints if new not in taken)
            free = _first_valid(new, lambda config: check_endpoint(config.endpoint)) or free
        if "http_port" in chosen and config.http:
            ports = {other.http_port for other in others if other.http}
            wanted = {config.http_port + number for number in numbers} - ports
            new = (replace(free, http_port=port) for port in sorted(wanted))
            free = _first_valid(new, check_http_port) or free
        check_endpoint(free.endpoint)
        check_http_port(free)
        write_config(free)
    if free != config:
        where = free.endpoint + f" and {base_url(free)}" * bool(free.http)
        print(f"launch: default ports are in use; {free.name!r} gets {where}", flush=True)
    return free


def _first_valid(configs: Iterable[Config], check: Callable[[Config], None]) -> Config | None:
    """Return the first configuration that `check` accepts, or None."""
    for config in configs:
        with contextlib.suppress(LaunchError):
            check(config)
            return config
    return None


def check_endpoint(endpoint: str) -> None:
    """Raise LaunchError if the gateway could not bind."""
    if endpoint.endswith((":*", ":0")):
        raise LaunchError(f"--endpoint {endpoint} has no port of its own")
    if endpoint.startswith("ipc://") and answers(endpoint.removeprefix("ipc://")):
        raise LaunchError(f"--endpoint {endpoint} is in use; give another one")
    try:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as trial:
            trial.setsockopt(zmq.IPV6, "[" in endpoint)
            bind(trial, endpoint)
    except (OSError, zmq.ZMQError) as error:
        if error.errno == zmq.EADDRINUSE:
            raise LaunchError(f"--endpoint {endpoint} is in use; give another one") from error
        raise LaunchError(f"--endpoint {endpoint} can't be bound: {error}") from error


def check_http_reach(config: Config) -> None:
    """Raise LaunchError if anyone could send HTTP requests, or the allowed origins are invalid."""
    try:
        _ = config.origins
    except msgspec.DecodeError as error:
        got = f"got {config.allowed_origins!r}, expected a JSON list of origins or one origin"
        raise LaunchError(f"--allowed-origins: {got}: {error}") from error
    if not (config.api_key or config.insecure or is_loopback(config.http_host)):
        try:
            socket.getaddrinfo(config.http_host or None, config.http_port)
        except (OSError, UnicodeError):
            got = f"got {config.http_host!r}, expected an address of this machine or its name"
            raise LaunchError(f"--http-host: {got}") from None
        hint = "give --api-key-file, or --insecure, with which anyone may send requests"
        where = f"--http-host {config.http_host} may be reached from other machines"
        raise LaunchError(f"{where}: {hint}")


def check_http_port(config: Config) -> None:
    """Raise LaunchError if the HTTP processes could not listen."""
    host, port = config.http_host, config.http_port
    if config.http == 0:
        return
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # like uvicorn
            trial.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(f"--http-port {port} is in use; give another one") from error
        raise LaunchError(f"--http-host {host}, --http-port {port}: {error.strerror}") from error
