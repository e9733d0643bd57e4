"""Processes on the nodes of the Ray cluster that the launcher joins.

Ray places an actor for each process. When an actor or its node is lost, Ray restarts the actor, on
another node if necessary. The actor runs the process as its child (`actor.py`). This module
implements the supervisor's process interface.
"""

import asyncio
import contextlib
import functools
import io
import ipaddress
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from penstock.launch.pipeline.errors import LaunchError, first_line
from penstock.launch.pipeline.hub import HubModel
from penstock.launch.pipeline.keys import make_keys
from penstock.launch.pipeline.procfile import kind_of, process_names
from penstock.launch.ray.actor import LOST, ProcessActor, Spec, Started
from penstock.launch.ray.nodes import DirectoryServer, FixedNetwork
from penstock.launch.ray.placement import Machine, OnNode, Placement, place
from penstock.launch.supervisor.processes import (
    GRACE,
    MakeProcesses,
    ManagedProcess,
    Policy,
    Processes,
    Tasks,
)
from penstock.protocol.config import DEFAULT_CLIENT, Config, write_config
from penstock.protocol.transport.context import CLIENTS, SERVER, attend, leave
from penstock.protocol.transport.discovery import KEYS_CLIENT, KEYS_FOLDER, Cluster, Directory, Node

JOIN_TIMEOUT = 5.0  # seconds within which the head of the cluster must answer
PING_TIMEOUT = 1.0  # seconds within which a reachable actor answers
# options of actors with a GPU: their process chooses the GPU itself, and shares memory with others
ENVIRONMENT = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


@contextlib.contextmanager
def on_cluster(
    config: Config, commands: dict[str, str], source: HubModel | None
) -> Iterator[tuple[MakeProcesses, set[str]]]:
    """Join the cluster of `--address` for the block.

    Yield the factory of the processes, and the kinds of processes that run only on this node.
    Raises LaunchError.
    """
    with _joined(config) as cluster:
        placement = cluster.place(config, list(commands))
        here = {kind for kind, node in placement.nodes.items() if cluster.is_here(node)}
        yield partial(RayProcesses, cluster, placement, source), here


class _Joined(NamedTuple):
    """The cluster, after this process has joined it."""

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
def _joined(config: Config) -> Iterator[_Joined]:
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
        yield _Joined(here, machines, context.get_job_id())
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Raise OSError if nothing listens at the address, since Ray itself would wait for minutes."""
    if address != "auto":
        host, _, port = address.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), JOIN_TIMEOUT).close()


def _machine(node: dict[str, Any]) -> Machine:
    resources = node["Resources"]
    cpus, gpus = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
    return Machine(node["NodeID"], node["NodeName"], node["NodeManagerAddress"], cpus, gpus)


class RemoteProcess(ManagedProcess):
    """Process with its actor."""

    def __init__(
        self,
        name: str,
        incarnations: Iterator[int],
        make_actor: Callable[[str], Awaitable[Any]],
        on_line: Callable[[ManagedProcess, str], None],
    ) -> None:
        """Initialize; make_actor: makes the actor of a name once the cluster has room for it."""
        super().__init__(name)
        self._actor: Any = None
        self._incarnations = incarnations
        self._make_actor = make_actor
        self._on_line = on_line
        self._number = 0

    async def spawn(self) -> None:
        """Start the process once Ray has placed its actor. Raises OSError, LaunchError."""
        self._actor = self._actor or await self._make_actor(self.name)
        started: Started | str | None = None
        try:
            while started is None:
                actor_id = await self._actor.id.remote()
                self._number = next(self._incarnations)
                started = await self._actor.start.remote(actor_id, self._number)
        except RayActorError as error:
            raise LaunchError(f"Ray has no place for {self.name} any more: {error}") from error
        if isinstance(started, str):
            raise OSError(started)
        self.pid, self.node = started.pid, started.node
        if not self.wanted.is_set():  # `stop` was called while the process was started
            self._actor.stop.remote(GRACE)

    async def wait(self) -> str:
        while True:
            try:
                lines, end = await self._actor.follow.remote(self._number)
            except RayActorError:
                end, lines = LOST, []
            for line in lines:
                self._on_line(self, line)
            if end is not None:
                return f"{end} on {self.node}" if end == LOST else str(end)

    async def terminate(self) -> None:
        if self._actor:
            await _reply(self._actor.stop.remote(GRACE), 2 * GRACE + PING_TIMEOUT)

    async def release(self) -> None:
        if self._actor:
            await _reply(self._actor.leave.remote(), GRACE if self.pid else PING_TIMEOUT)
            ray.kill(self._actor)

    def signal(self, number: int) -> None:
        self._actor.signal.remote(self.pid, number)

    async def kill(self) -> bool:
        pid = self.pid
        if await _reply(self._actor.ping.remote(), PING_TIMEOUT) is None:
            return False
        self._actor.signal.remote(pid, signal.SIGKILL)
        return True

    async def vitals(self, pid: int) -> tuple[float, bool]:
        return await _reply(self._actor.vitals.remote(pid), PING_TIMEOUT) or (0.0, False)


async def _reply(reply: Any, timeout: float) -> Any:
    """Wait for an actor's reply; return None if the actor is unreachable."""
    with contextlib.suppress(TimeoutError, RayActorError):
        return await asyncio.wait_for(reply, timeout)
    return None


class _Nowhere(io.TextIOBase):
    def write(self, text: str) -> int:
        return len(text)


class RayProcesses(Processes):
    """Implementation of `Processes` for a cluster."""

    def __init__(
        self,
        joined: _Joined,
        placement: Placement,
        source: HubModel | None,
        config: Config,
        commands: dict[str, str],
        policy: Policy,
        tasks: Tasks,
    ) -> None:
        """Initialize. Raises LaunchError.

        source: where each node downloads the model from. commands: by kind of process.
        """
        super().__init__(policy, tasks)
        self._joined = joined
        self._placement = placement
        self._source = source
        self._config = config
        self._commands = commands
        self._incarnations = count(1)
        # Ray prints long reports about every death; the policy reports a death in one line
        self._printing = contextlib.redirect_stdout(_Nowhere())
        self._printing.__enter__()
        folder = config.run_folder
        self._keys = _make_keys(folder / KEYS_FOLDER)
        self.watchdog_context = self._fixed = FixedNetwork(joined.here.host, folder)
        directory = DirectoryServer(self._fixed, self._on_directory)
        self._handlers = [*self._fixed.handlers, (directory.channel, directory.handle)]
        attend(self._handlers)
        self._groups: list[PlacementGroup] = []
        self._reserved = self._tasks.start(self._reserve())

    @functools.cached_property
    def context(self) -> Cluster:
        """Context of `Processes`; the watchdog's socket is already bound, at a fixed address."""
        here, folder = self._joined.here, self._config.run_folder
        node = Node(here.node_id, here.name, here.host, self._fixed.fixed)
        context = Cluster(node, folder)
        self._handlers += context.handlers
        attend(self._handlers)
        return context

    async def close(self) -> None:
        await super().close()
        self._reserved.cancel()
        for group in self._groups:
            remove_placement_group(group)
        leave(self._handlers)
        self._fixed.destroy(linger=0)
        self.context.destroy(linger=0)
        self._printing.__exit__(None, None, None)

    async def _reserve(self) -> None:
        """Wait until all groups have places; Ray's awaitable for a group would start a process."""
        for bundles, strategy in (
            (group.bundles, group.strategy) for group in self._placement.groups
        ):
            group = placement_group(bundles, strategy)
            self._groups.append(group)
            if not await asyncio.to_thread(PlacementGroup.wait, group, 1):
                self._policy.say(f"waits until the cluster has room for a group: {bundles}")
            while not await asyncio.to_thread(PlacementGroup.wait, group, 1):
                pass

    async def wait_spawned(self, names: Iterable[str]) -> None:
        """Return immediately, since a process may wait for a machine."""

    def _make(self, name: str) -> RemoteProcess:
        return RemoteProcess(name, self._incarnations, self._make_actor, self._policy.take_line)

    async def _make_actor(self, name: str) -> Any:
        await asyncio.shield(self._reserved)  # no other process takes the resources of a group
        num_gpus = self._placement.num_gpus(name)
        options: dict[str, Any] = {"num_cpus": 1, "num_gpus": num_gpus, "max_restarts": -1}
        if num_gpus:
            options["runtime_env"] = {"env_vars": ENVIRONMENT}
        spec = Spec(
            name=name,
            command=self._commands[kind_of(name)],
            config=msgspec.structs.replace(self._config, device=self._placement.device),
            source=self._source,
            run=self._joined.run,
            fixed=self._fixed.fixed,
            keys=self._keys,
            public_keys=_public_keys(self._config.curve_keys),
        )
        actor: Any = ProcessActor
        return actor.options(scheduling_strategy=self._strategy(name), **options).remote(spec)

    def _strategy(self, name: str) -> Any:
        if at := self._placement.bundles.get(name):
            return PlacementGroupSchedulingStrategy(self._groups[at.group], at.number)
        if on := self._placement.nodes.get(kind_of(name)):
            return NodeAffinitySchedulingStrategy(
                on.node_id, on.soft, _spill_on_unavailable=on.soft
            )
        return "SPREAD"

    def _on_directory(self, directory: Directory) -> None:
        """Write the gateway's address into the run folder, for clients on this machine."""
        if (clients := directory.addresses.get("clients")) is None:
            return
        on = self._placement.nodes["gateway"]
        if on.soft and clients.node_id != self._joined.here.node_id:
            host = clients.tcp.rpartition(":")[0]
            port = self._config.endpoint.rpartition(":")[2]
            write_config(msgspec.structs.replace(self._config, endpoint=f"{host}:{port}"))
        else:
            write_config(self._config)


def _make_keys(folder: Path) -> dict[str, bytes]:
    """Make keys in this folder; return the files that the processes need."""
    make_keys(folder, None)
    make_keys(folder, KEYS_CLIENT)
    public = f"{CLIENTS}/{KEYS_CLIENT}.key"
    names = (f"{SERVER}.key", f"{SERVER}.key_secret", f"{KEYS_CLIENT}.key_secret", public)
    return {name: (folder / name).read_bytes() for name in names}


def _public_keys(keys: str) -> dict[str, bytes]:
    """Return the files of `--curve-keys`, by path, that the gateway and internal clients need."""
    if not keys:
        return {}
    folder = Path(keys)
    names = (f"{SERVER}.key", f"{SERVER}.key_secret", f"{DEFAULT_CLIENT}.key_secret")
    paths = [*(folder / name for name in names), *(folder / CLIENTS).glob("*.key")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}
