"""Options of the commands that send requests: which pipeline, which key, sampling parameters."""

import math
import socket
import sys
import time
from argparse import ArgumentParser, Namespace
from typing import Any

from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.options import add_name, add_options, given_options, name_of
from penstock.launch.pipeline.procfile import check_descriptors
from penstock.launch.pipeline.run_folder import running_config
from penstock.protocol.client.client import Client
from penstock.protocol.client.connection import check_addresses
from penstock.protocol.client.session import ClientError, NoAnswer
from penstock.protocol.config import DEFAULT_CLIENT
from penstock.protocol.messages.sampling import SamplingParams

OPEN_FILES = 32  # descriptors of a command with a client, at most

SILENCE = 2.0  # seconds without a connection after which the command reports that it waits


class WaitingClient(Client):
    """A client that waits without end, and reports on stderr that nothing answers."""

    def __init__(
        self, endpoint: str, keys: str | None, client: str, seconds: float = math.inf
    ) -> None:
        """Raise ClientError for unreadable keys and an invalid address.

        seconds: from the first `wait` until it raises NoAnswer.
        """
        super().__init__(endpoint, timeout=min(SILENCE, seconds), keys=keys, client=client)
        self._endpoint = endpoint
        self._seconds = seconds
        self._deadline = math.inf
        self._has_reported = False

    def wait(self) -> None:
        """Wait for a sign of the pipeline; report once that it is not connected."""
        self._deadline = min(self._deadline, time.monotonic() + self._seconds)
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise NoAnswer(f"no whole answer within {self._seconds:g} s")
        self._timeout = min(SILENCE, left)
        try:
            super().wait()
        except NoAnswer:
            if not (self._connection.is_connected or self._has_reported):
                text = f"launch: waiting for {self._endpoint}: nothing answers there yet"
                print(text, file=sys.stderr, flush=True)
                self._has_reported = True

    def abort(self, request_id: str) -> bool:
        """End a request early. Return False if no such request is running, or nothing answers."""
        return self._connection.is_connected and super().abort(request_id)


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
    command.add_argument("--system", metavar="TEXT", help="system prompt")
    fields = [field for field in SamplingParams.__struct_fields__ if field != "n"]
    add_options(command, SamplingParams, fields)


def request_fields(arguments: Namespace) -> dict[str, Any]:
    """Return the fields of requests that were given."""
    return given_options(arguments, SamplingParams) | {"model": arguments.model}


def system_messages(arguments: Namespace) -> list[dict[str, str]]:
    """Return the messages that begin a conversation."""
    return [{"role": "system", "content": arguments.system}] if arguments.system else []


def connect_client(arguments: Namespace) -> Client:
    """Return a client that connects. Raises LaunchError for an invalid address and keys."""
    check_descriptors(OPEN_FILES, "; raise it (`ulimit -n`)")
    endpoint, keys = arguments.endpoint, arguments.curve_keys
    if endpoint is None:
        config = running_config(name_of(arguments))
        endpoint, keys = config.endpoint, keys or config.curve_keys
    try:
        check_addresses(endpoint)
        if arguments.endpoint:
            _check_hosts(endpoint)
        seconds = getattr(arguments, "timeout", math.inf)
        return WaitingClient(endpoint, keys, arguments.client, seconds)
    except ClientError as error:
        raise LaunchError(str(error)) from error


def _check_hosts(endpoint: str) -> None:
    """Raise LaunchError if no host of the addresses can be resolved: libzmq would retry for ever.

    libzmq looks for addresses of IPv6 only where the address has brackets.
    """
    reasons = []
    for one in endpoint.split(","):
        host = one.removeprefix("tcp://").rpartition(":")[0].rpartition(";")[2]
        if one.startswith("ipc://") or host == "*":
            return
        family = socket.AF_UNSPEC if "[" in one else socket.AF_INET
        try:
            socket.getaddrinfo(host.strip("[]").encode(), None, family)
        except OSError as error:
            reasons.append(f"{host}: {error.strerror}")
        else:
            return
    raise LaunchError(
        f"--endpoint: got {endpoint!r}, expected a host that can be resolved ({'; '.join(reasons)})"
    )
