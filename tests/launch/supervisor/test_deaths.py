"""Deaths that have a reason do not count; others do."""

import pytest

from penstock.launch.supervisor import deaths as module
from penstock.launch.supervisor.child import Child
from penstock.launch.supervisor.deaths import ExplainedDeaths
from penstock.protocol.poison import PoisonFound, ProcessesDied


def child() -> Child:
    return Child(lambda line: line)


def die(one: Child, pid: int) -> int:
    one.pid = pid
    return one.count_death()


def test_every_death_of_a_suspect_is_taken_back() -> None:
    worker, other = child(), child()
    explained = ExplainedDeaths({"worker.1": worker, "worker.2": other})
    for pid in (1, 2):
        assert die(worker, pid) == pid
        explained.handle(ProcessesDied([("worker.1", pid)], [b"innocent", b"poison"]))
    explained.handle(ProcessesDied([("worker.2", 7), ("gone", 8)], [b"poison"]))
    explained.handle(PoisonFound(b"poison"))
    assert die(worker, 3) == 1, "of three deaths two are explained"
    assert die(other, 7) == 0, "a reason that is known before the death"
    assert die(other, 9) == 1


def test_other_deaths_count() -> None:
    worker = child()
    explained = ExplainedDeaths({"worker.1": worker})
    explained.handle(ProcessesDied([("worker.1", 1)], [b"innocent"]))
    explained.handle(PoisonFound(b"poison"))
    assert [die(worker, pid) for pid in (1, 2, 3)] == [1, 2, 3]


def test_suspects_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SUSPECTS", 10)
    worker = child()
    explained = ExplainedDeaths({"worker.1": worker})
    explained.handle(ProcessesDied([("worker.1", 1)], [b"%d" % n for n in range(100)]))
    assert len(explained._deaths) == 10
    explained.handle(PoisonFound(b"99"))
    assert die(worker, 1) == 0
