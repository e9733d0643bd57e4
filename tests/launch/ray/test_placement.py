"""Placement of processes on nodes."""

from typing import Any

import pytest

from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.procfile import process_names, read_procfile
from penstock.launch.ray.placement import Bundle, Group, Machine, OnNode, Placement, place
from penstock.protocol.config import Config

HERE = {"gateway": OnNode("n1", soft=False)}


def machine(number: int, cpus: float, gpus: float = 0) -> Machine:
    return Machine(f"n{number}", f"gpu{number}", f"10.0.0.{number}", cpus, gpus)


def placed(*machines: Machine, nodes: dict[str, OnNode] | None = None, **fields: Any) -> Placement:
    config = Config(**{"http": 0} | fields)
    return place(config, process_names(config, read_procfile()), list(machines), nodes or {})


def test_a_replica_that_fits_a_node_stays_there() -> None:
    placement = placed(machine(1, 20), machine(2, 20), tp=2, dp=2)
    assert placement.groups == [Group("STRICT_PACK", [{"CPU": 2}, {"CPU": 1}])] * 2
    assert placement.bundles == {
        "scheduler.1": Bundle(0, 0),
        "worker.1": Bundle(0, 0),
        "worker.2": Bundle(0, 1),
        "scheduler.2": Bundle(1, 0),
        "worker.3": Bundle(1, 0),
        "worker.4": Bundle(1, 1),
    }


def test_what_fits_no_node_is_packed() -> None:
    one, two = placed(machine(1, 20, 6), machine(2, 20, 2), tp=4, dp=2).groups
    assert (one.strategy, two.strategy) == ("STRICT_PACK", "PACK")
    assert one.bundles == [{"CPU": 2, "GPU": 1}] + [{"CPU": 1, "GPU": 1}] * 3


def test_spare_workers_belong_to_their_replica() -> None:
    placement = placed(machine(1, 20), tp=2, dp=2, spare_workers=1)
    assert [len(group.bundles) for group in placement.groups] == [3, 3]
    assert placement.bundles["worker.5"] == Bundle(0, 2)
    assert placement.bundles["worker.6"] == Bundle(1, 2)


def test_what_has_an_address_of_a_node_is_placed_first() -> None:
    placement = placed(machine(1, 2), machine(2, 4), nodes=HERE)
    front, replica = placement.groups
    assert front == Group("PACK", [{"node:10.0.0.1": 0.001, "CPU": 1}])
    assert placement.bundles["gateway.1"] == Bundle(0, 0)
    assert placement.bundles["scheduler.1"] == Bundle(1, 0)
    assert replica.strategy == "STRICT_PACK"
    soft = placed(machine(1, 9), nodes={"gateway": OnNode("n1", soft=True)})
    assert "gateway.1" not in soft.bundles


@pytest.mark.parametrize(
    ("device", "gpus", "chosen"),
    [("auto", 2, "cuda"), ("auto", 1, "cpu"), ("cpu", 2, "cpu"), ("cuda", 2, "cuda")],
)
def test_a_gpu_for_each_worker(device: str, gpus: int, chosen: str) -> None:
    placement = placed(machine(1, 9, gpus), device=device, tp=2)
    assert placement.device == chosen
    assert placement.num_gpus("worker.1") == (chosen == "cuda")
    assert placement.num_gpus("scheduler.1") == 0


@pytest.mark.parametrize(
    ("machines", "fields", "sentence"),
    [
        (
            [machine(1, 2), machine(2, 2)],
            {},
            "5 processes need 5 CPUs; the cluster has 4 CPUs and 0 GPUs (gpu1: 2 CPUs, 0 GPUs, ",
        ),
        (
            [machine(1, 9, 1)],
            {"device": "cuda", "tp": 2},
            "6 processes need 6 CPUs and 2 GPUs; the cluster has 9 CPUs and 1 GPUs ",
        ),
        (
            [machine(number, 1) for number in range(1, 6)],
            {},
            "a replica needs 2 CPUs, of which 2 CPUs on one node; ",
        ),
        ([machine(1, 0), machine(2, 9)], {}, "gateway.1 must run on node gpu1, of 0 CPUs"),
    ],
)
def test_what_the_cluster_can_never_hold(
    machines: list[Machine], fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(LaunchError) as error:
        placed(*machines, nodes=HERE, **fields)
    assert str(error.value).startswith(sentence)
