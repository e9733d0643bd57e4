"""Options of the commands that send requests: which pipeline, which key, sampling parameters."""

from argparse import ArgumentParser, Namespace
from typing import Any

from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.options import add_name, add_options, given_options, name_of
from penstock.launch.pipeline.procfile import check_descriptors
from penstock.launch.pipeline.run_folder import running_config
from penstock.protocol.client.client import Client
from penstock.protocol.client.errors import ClientError
from penstock.protocol.config import DEFAULT_CLIENT
from penstock.protocol.messages.sampling import SamplingParams

OPEN_FILES = 32
"""descriptors of a command with a client, at most"""


def add_client_options(command: ArgumentParser) -> None:
    """Add the options."""
    add_name(command)
    text = "address of the gateway, in place of --name; A,B,…: several addresses for failover"
    command.add_argument("--endpoint", help=text)
    text = "folder with server.key and NAME.key_secret"
    command.add_argument("--curve-keys", metavar="FOLDER", help=text)
    command.add_argument(
        "--client",
        metavar="NAME",
        default=DEFAULT_CLIENT,
        help="name of the client key (default: %(default)s)",
    )
    command.add_argument("--model", help="name of the model (default: the first one)")
    fields = [field for field in SamplingParams.__struct_fields__ if field != "n"]
    add_options(command, SamplingParams, fields)


def request_fields(arguments: Namespace) -> dict[str, Any]:
    """Return the fields of requests that were given."""
    return given_options(arguments, SamplingParams) | {"model": arguments.model}


def connect_client(arguments: Namespace) -> Client:
    """Return a client that connects. Raises LaunchError for an invalid address and keys."""
    check_descriptors(OPEN_FILES, "; raise it (`ulimit -n`)")
    endpoint, keys = arguments.endpoint, arguments.curve_keys
    if endpoint is None:
        config = running_config(name_of(arguments))
        endpoint, keys = config.endpoint, keys or config.curve_keys
    try:
        return Client(endpoint, keys=keys, client=arguments.client)
    except ClientError as error:
        raise LaunchError(str(error)) from error
