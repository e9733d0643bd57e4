"""Placement of processes on the nodes of a Ray cluster.

A replica is a placement group, so that Ray reserves all of it or nothing: its first bundle is for
the scheduler and the worker of rank 0, each further one for a worker. What is reached at an address
of one node has a group, too, the first one, or a replica could take its place. Others are spread
over the nodes.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Literal, NamedTuple

from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.procfile import kind_of
from penstock.protocol.config import Config, replica_of

Resources = Counter[str]
Free = dict[str, tuple[float, float]]  # CPUs and GPUs by node


class Machine(NamedTuple):
    """A node of the cluster, and what it has in all, whoever uses it now."""

    node_id: str
    name: str
    host: str  # the address at which the other nodes reach it
    cpus: float
    gpus: float


class Group(NamedTuple):
    """Places that are reserved together, before those of the next group."""

    strategy: Literal["PACK", "STRICT_PACK"]
    bundles: list[dict[str, float]]


class Bundle(NamedTuple):
    """A place in a group."""

    group: int
    number: int


class OnNode(NamedTuple):
    """A place at a node; `soft`: another one will do if that one is lost or full."""

    node_id: str
    soft: bool


class Placement(NamedTuple):
    """The nodes and bundles of all processes."""

    device: Literal["cpu", "cuda"]
    groups: list[Group]
    bundles: dict[str, Bundle]  # by name of the process
    nodes: dict[str, OnNode]  # by kind of process; what is in neither is spread

    def num_gpus(self, name: str) -> int:
        return int(self.device == "cuda" and kind_of(name) == "worker")


def place(
    config: Config, names: list[str], machines: list[Machine], nodes: dict[str, OnNode]
) -> Placement:
    """Find a place for each of `names`; nodes: as in `Placement`, chosen by the addresses.

    Raises LaunchError where the cluster could not hold them even if nobody else used it.
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
        # Ray gives each node one of `node:HOST`
        own = [{f"node:{hosts[node]}": 0.001, **bundle} for node, bundle in bundles.items()]
        placement.groups.append(Group("PACK", own))


def _device(config: Config, names: list[str], machines: list[Machine]) -> Literal["cpu", "cuda"]:
    """`auto` as `--device` has it: on GPUs if there is one for each worker."""
    num_workers = sum(kind_of(name) == "worker" for name in names)
    if config.device == "auto":
        return "cuda" if 0 < num_workers <= sum(machine.gpus for machine in machines) else "cpu"
    return config.device


def _check_sums(placement: Placement, names: list[str], machines: list[Machine]) -> None:
    num_gpus = sum(map(placement.num_gpus, names))
    cpus, gpus = (
        sum(machine.cpus for machine in machines),
        sum(machine.gpus for machine in machines),
    )
    if num_gpus > gpus or len(names) > cpus:
        asked = f"{len(names)} processes need {len(names)} CPUs" + (
            f" and {num_gpus} GPUs" if num_gpus else ""
        )
        raise LaunchError(f"{asked}; the cluster has {_sum(machines)}")


def _sum(machines: list[Machine]) -> str:
    each = ", ".join(
        f"{machine.name}: {machine.cpus:g} CPUs, {machine.gpus:g} GPUs" for machine in machines
    )
    cpus, gpus = (
        sum(machine.cpus for machine in machines),
        sum(machine.gpus for machine in machines),
    )
    return f"{cpus:g} CPUs and {gpus:g} GPUs ({each})"


def _bundles(placement: Placement, members: list[str]) -> list[Resources]:
    """Note the places of a replica's processes; return what each bundle needs."""
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
    """Reserve the bundles on one node if they fit next to existing reservations."""
    whole = sum(bundles, Counter[str]())
    nodes = sorted(free, key=lambda node: free[node][::-1])  # GPUs count first, fewest first
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
    """Take resources from the first of the nodes that has them."""
    for node in nodes:
        cpus = free[node][0] - asked["CPU"]
        gpus = free[node][1] - asked["GPU"]
        if cpus >= 0 and gpus >= 0:
            free[node] = cpus, gpus
            return True
    return False
