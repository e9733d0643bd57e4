"""Replicas of processes, and their connections."""

import pytest

from penstock.protocol.config import Config, replica_of
from penstock.protocol.transport.context import endpoints


def test_every_replica_gets_as_many_workers_and_spares() -> None:
    config = Config(tp=2, dp=3, spare_workers=1)
    assert [replica_of(f"worker.{n}", config) for n in range(1, 10)] == [0, 0, 1, 1, 2, 2, 0, 1, 2]
    assert [replica_of(f"scheduler.{n}", config) for n in (1, 2, 3)] == [0, 1, 2]


@pytest.mark.parametrize("name", ["tokenizer.2", "worker", "worker.x", "gateway.1", ""])
def test_others_belong_to_none_or_to_the_first(name: str) -> None:
    assert replica_of(name, Config(tp=1, dp=4)) == 0


def test_one_replica_has_everything() -> None:
    config = Config(tp=2)
    assert {replica_of(name, config) for name in ("scheduler.77", "worker.3", "worker.9000")} == {0}


def test_replicas_share_all_but_what_their_schedulers_bind() -> None:
    config = Config(dp=2)
    differ = {
        name
        for name, one, other in zip(
            endpoints(config)._fields, endpoints(config), endpoints(config, 1), strict=True
        )
        if one != other
    }
    assert differ == {"requests", "workers", "detokenizers"}
