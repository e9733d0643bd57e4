"""Deaths that a request may explain do not count; others do."""

import pytest

from penstock.launch.supervisor import child as module
from penstock.launch.supervisor.child import Child, ExplainedDeaths
from penstock.protocol.messages.supervisor import PoisonFound, ProcessesDied, SuspectsCleared


def child() -> Child:
    return Child(lambda line: line)


def die(one: Child, pid: int) -> int:
    one.pid = pid
    return one.count_death()


def test_a_death_counts_when_every_suspect_is_cleared() -> None:
    worker, other = child(), child()
    explained = ExplainedDeaths({"worker.1": worker, "worker.2": other})
    for pid in (1, 2):
        assert die(worker, pid) == 1, "the one before is explained"
        explained.handle(ProcessesDied([("worker.1", pid)], [b"innocent", b"poison"]))
    explained.handle(ProcessesDied([("worker.2", 7), ("unknown", 8)], [b"poison"]))
    explained.handle(SuspectsCleared([b"innocent"]))
    explained.handle(PoisonFound(b"poison"))
    assert die(worker, 3) == 1
    assert die(other, 7) == 0, "a reason that is known before the death"
    assert die(other, 9) == 1
    explained.handle(ProcessesDied([("worker.1", 3)], [b"innocent", b"late"]))
    assert die(worker, 4) == 1
    explained.handle(SuspectsCleared([b"late"]))
    explained.handle(SuspectsCleared([b"innocent"]))
    assert die(worker, 5) == 3


@pytest.mark.parametrize("num_poisons", [1, 5])
def test_poison_never_counts_twice(num_poisons: int) -> None:
    """One poison three times, or five poisons whose clients leave after the first death."""
    worker = child()
    explained = ExplainedDeaths({"worker.1": worker})
    for pid in range(1, 6):
        assert die(worker, pid) == 1
        explained.handle(ProcessesDied([("worker.1", pid)], [b"%d" % (pid % num_poisons)]))


def test_other_deaths_count() -> None:
    worker = child()
    ExplainedDeaths({"worker.1": worker}).handle(PoisonFound(b"poison"))
    assert [die(worker, pid) for pid in (1, 2, 3)] == [1, 2, 3]


def test_poison_is_remembered() -> None:
    explained = ExplainedDeaths({})
    explained.handle(PoisonFound(b"a"))
    explained.handle(PoisonFound(b"b"))
    assert explained.poison.digests() == [b"a", b"b"]


def test_deaths_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_DEATHS", 10)
    explained = ExplainedDeaths({"worker.1": child()})
    for pid in range(100):
        explained.handle(ProcessesDied([("worker.1", pid)], [b"a"]))
    assert len(explained._suspects) == 10
