"""The Ray cluster on which a pipeline is to run, as seen by the launcher."""

import contextlib
import ipaddress
import logging
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

import ray

from penstock.launch.pipeline.errors import LaunchError, first_line
from penstock.launch.pipeline.procfile import process_names
from penstock.launch.ray.placement import Machine, OnNode, Placement, place
from penstock.protocol.config import Config

TIMEOUT = 5.0  # seconds within which the head of the cluster must answer


class Joined(NamedTuple):
    """Joined cluster."""

    here: Machine  # the node of this process
    machines: list[Machine]  # nodes that are alive now
    run: str  # name of this pipeline, unique in the cluster

    def place(self, config: Config, kinds: list[str]) -> Placement:
        """Return a place for every process. Raises LaunchError."""
        nodes = {"gateway": self._node(config.endpoint, _host(config.endpoint), "--endpoint")}
        if at := self._http_node(config):
            nodes["http"] = at
        return place(config, process_names(config, kinds), self.machines, nodes)

    def is_here(self, at: OnNode | None) -> bool:
        """Return whether a place is restricted to this node."""
        return at == OnNode(self.here.node_id, soft=False)

    def _http_node(self, config: Config) -> OnNode | None:
        at = self._node(config.http_host, config.http_host, "--http-host")
        return None if at.soft else at

    def _node(self, given: str, host: str, flag: str) -> OnNode:
        """Return the node that can bind an address; for a wildcard, preferably this node."""
        if host in ("*", "0.0.0.0", "::"):  # noqa: S104
            return OnNode(self.here.node_id, soft=True)
        if _is_own(host):
            return OnNode(self.here.node_id, soft=False)
        for machine in self.machines:
            if machine.host == _resolved(host):
                return OnNode(machine.node_id, soft=False)
        hosts = ", ".join(machine.host for machine in self.machines)
        raise LaunchError(f"{flag}: got {given}, expected an address of the cluster: {hosts}")


def _host(endpoint: str) -> str:
    if endpoint.startswith("ipc://"):
        return "127.0.0.1"
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def _resolved(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError:
        return host


def _is_own(host: str) -> bool:
    """Return whether a socket of this machine could bind to the host."""
    address = _resolved(host)
    try:
        is_ipv6 = ipaddress.ip_address(address).version == 6
        with socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET) as trial:
            trial.bind((address, 0))
    except (OSError, ValueError):
        return False
    return True


@contextlib.contextmanager
def joined(config: Config) -> Iterator[Joined]:
    """Join the cluster of `--address` for the block. Raises LaunchError if it is unreachable."""
    try:
        _check_answers(config.address)
        ray.init(config.address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        raise LaunchError(
            f"no Ray cluster at --address {config.address} that this machine is a node of; "
            f"`ray start` makes it one ({first_line(error)})"
        ) from error
    try:
        context = ray.get_runtime_context()
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        machines = [_machine(node) for node in nodes if node["Alive"]]
        here = next(machine for machine in machines if machine.node_id == context.get_node_id())
        yield Joined(here, machines, context.get_job_id())
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Raise OSError if nothing listens at the address, since Ray itself would wait for minutes."""
    if address != "auto":
        host, _, port = address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), TIMEOUT).close()


def _machine(node: dict[str, Any]) -> Machine:
    resources = node["Resources"]
    cpus, gpus = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
    return Machine(node["NodeID"], node["NodeName"], node["NodeManagerAddress"], cpus, gpus)
