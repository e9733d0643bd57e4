"""Placement of processes on the nodes of a Ray cluster.

A replica is a placement group, so that Ray reserves all of it or nothing. Its first bundle is for
the scheduler and the worker of rank 0, each further bundle is for a worker. Processes with an
address on a particular node form a group as well. It is the first group, since a replica could
otherwise take its place. All other processes are spread over the nodes.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Literal, NamedTuple

from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.procfile import kind_of
from penstock.protocol.config import Config, replica_of

Resources = Counter[str]
Free = dict[str, tuple[float, float]]  # node → CPUs and GPUs


class Machine(NamedTuple):
    """Node of the cluster with its total resources, whether they are in use or not."""

    node_id: str
    name: str
    host: str  # address at which other nodes reach this node
    cpus: float
    gpus: float


class Group(NamedTuple):
    """Places that are reserved together, before the places of the next group."""

    strategy: Literal["PACK", "STRICT_PACK"]
    bundles: list[dict[str, float]]


class Bundle(NamedTuple):
    """Place in a group."""

    group: int
    number: int


class OnNode(NamedTuple):
    """Place on a node; `soft`: Ray may choose another node if this node is lost or full."""

    node_id: str
    soft: bool


class Placement(NamedTuple):
    """Nodes and bundles of all processes."""

    device: Literal["cpu", "cuda"]
    groups: list[Group]
    bundles: dict[str, Bundle]  # by process name
    nodes: dict[str, OnNode]  # by kind of process; processes in neither map are spread

    def num_gpus(self, name: str) -> int:
        return int(self.device == "cuda" and kind_of(name) == "worker")


def place(
    config: Config, names: list[str], machines: list[Machine], nodes: dict[str, OnNode]
) -> Placement:
    """Find a place for each of `names`; nodes: see `Placement`, determined by the addresses.

    Raises LaunchError if the cluster could not hold the processes even without other users.
    """
    device = _device(config, names, machines)
    placement = Placement(device, [], {}, nodes)
    _check_sums(placement, names, machines)
    free = {machine.node_id: (machine.cpus, machine.gpus) for machine in machines}
    _place_fixed(placement, names, machines, free)
    for replica in range(config.dp):
        members = [
            name
            for name in names
            if kind_of(name) in ("scheduler", "worker") and replica_of(name, config) == replica
        ]
        if members:
            bundles = _bundles(placement, members)
            strategy = _reserve(free, bundles, machines)
            placement.groups.append(Group(strategy, [dict(bundle) for bundle in bundles]))
    return placement


def _place_fixed(
    placement: Placement, names: list[str], machines: list[Machine], free: Free
) -> None:
    bundles: dict[str, Resources] = {}
    for name in names:
        at = placement.nodes.get(kind_of(name))
        if at is None or at.soft:
            continue
        machine = next(machine for machine in machines if machine.node_id == at.node_id)
        if not _take(free, [at.node_id], Counter(CPU=1)):
            raise LaunchError(f"{name} must run on node {machine.name}, of {machine.cpus:g} CPUs")
        bundles.setdefault(at.node_id, Counter())["CPU"] += 1
        placement.bundles[name] = Bundle(0, list(bundles).index(at.node_id))
    if bundles:
        hosts = {machine.node_id: machine.host for machine in machines}
        # Ray gives each node a resource `node:HOST`
        own = [{f"node:{hosts[node]}": 0.001, **bundle} for node, bundle in bundles.items()]
        placement.groups.append(Group("PACK", own))


def _device(config: Config, names: list[str], machines: list[Machine]) -> Literal["cpu", "cuda"]:
    """Resolve `auto` like `--device`: GPUs are used if each worker can have one."""
    num_workers = sum(kind_of(name) == "worker" for name in names)
    if config.device == "auto":
        return "cuda" if 0 < num_workers <= sum(machine.gpus for machine in machines) else "cpu"
    return config.device


def _check_sums(placement: Placement, names: list[str], machines: list[Machine]) -> None:
    num_gpus = sum(map(placement.num_gpus, names))
    cpus, gpus = _totals(machines)
    if num_gpus > gpus or len(names) > cpus:
        asked = f"{len(names)} processes need {len(names)} CPUs" + (
            f" and {num_gpus} GPUs" if num_gpus else ""
        )
        raise LaunchError(f"{asked}; the cluster has {_sum(machines)}")


def _totals(machines: list[Machine]) -> tuple[float, float]:
    return sum(machine.cpus for machine in machines), sum(machine.gpus for machine in machines)


def _sum(machines: list[Machine]) -> str:
    each = ", ".join(
        f"{machine.name}: {machine.cpus:g} CPUs, {machine.gpus:g} GPUs" for machine in machines
    )
    cpus, gpus = _totals(machines)
    return f"{cpus:g} CPUs and {gpus:g} GPUs ({each})"


def _bundles(placement: Placement, members: list[str]) -> list[Resources]:
    """Record the places of a replica's processes; return the resources of each bundle."""
    workers = [name for name in members if kind_of(name) == "worker"]
    bundles: list[Resources] = [Counter() for _ in workers] or [Counter()]
    for name in members:
        index = workers.index(name) if name in workers else 0
        placement.bundles[name] = Bundle(len(placement.groups), index)
        bundles[index] += Counter(CPU=1, GPU=placement.num_gpus(name))
    return bundles


def _reserve(
    free: Free, bundles: list[Resources], machines: list[Machine]
) -> Literal["PACK", "STRICT_PACK"]:
    """Reserve the bundles on a single node if they fit in addition to existing reservations."""
    whole = sum(bundles, Counter[str]())
    # sorted by GPUs, then by CPUs, ascending
    nodes = sorted(free, key=lambda node: free[node][::-1])
    if _take(free, nodes, whole):
        return "STRICT_PACK"
    for bundle in bundles:
        if not _take(free, reversed(nodes), bundle):
            raise LaunchError(
                f"a replica needs {_words(whole)}, of which {_words(bundle)} on one node; next "
                f"to the other processes that does not fit into {_sum(machines)}"
            )
    return "PACK"


def _words(resources: Resources) -> str:
    return " and ".join(f"{number:g} {kind}s" for kind, number in resources.items())


def _take(free: Free, nodes: Iterable[str], asked: Resources) -> bool:
    """Take resources from the first of the nodes that has enough."""
    for node in nodes:
        cpus = free[node][0] - asked["CPU"]
        gpus = free[node][1] - asked["GPU"]
        if cpus >= 0 and gpus >= 0:
            free[node] = cpus, gpus
            return True
    return False
