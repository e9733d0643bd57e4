"""Deaths that a request may explain do not count; others do."""

import pytest

from penstock.launch.supervisor import supervisor as module
from penstock.launch.supervisor.supervisor import Deaths
from penstock.protocol.messages.supervisor import PoisonFound, ProcessesDied, SuspectsCleared


def test_a_death_counts_when_every_suspect_is_cleared() -> None:
    deaths = Deaths()
    for pid in (1, 2):
        assert deaths.count("worker.1", pid) == 1, "the one before is explained"
        deaths.handle(ProcessesDied([("worker.1", pid)], [b"innocent", b"poison"]))
    deaths.handle(ProcessesDied([("worker.2", 7), ("unknown", 8)], [b"poison"]))
    deaths.handle(SuspectsCleared([b"innocent"]))
    deaths.handle(PoisonFound(b"poison"))
    assert deaths.count("worker.1", 3) == 1
    assert deaths.count("worker.2", 7) == 0, "a reason that is known before the death"
    assert deaths.count("worker.2", 9) == 1
    deaths.handle(ProcessesDied([("worker.1", 3)], [b"innocent", b"late"]))
    assert deaths.count("worker.1", 4) == 1
    deaths.handle(SuspectsCleared([b"late"]))
    deaths.handle(SuspectsCleared([b"innocent"]))
    assert deaths.count("worker.1", 5) == 3


@pytest.mark.parametrize("num_poisons", [1, 5])
def test_poison_never_counts_twice(num_poisons: int) -> None:
    """One poison three times, or five poisons whose clients leave after the first death."""
    deaths = Deaths()
    for pid in range(1, 6):
        assert deaths.count("worker.1", pid) == 1
        deaths.handle(ProcessesDied([("worker.1", pid)], [b"%d" % (pid % num_poisons)]))


def test_other_deaths_count(monkeypatch: pytest.MonkeyPatch) -> None:
    deaths = Deaths()
    deaths.handle(PoisonFound(b"poison"))
    assert [deaths.count("worker.1", pid) for pid in (1, 2, 3)] == [1, 2, 3]
    now = module.time.monotonic() + module.CRASH_WINDOW + 1
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    assert deaths.count("worker.1", 4) == 1, "the others are too long ago"


def test_poison_is_remembered() -> None:
    deaths = Deaths()
    deaths.handle(PoisonFound(b"a"))
    deaths.handle(PoisonFound(b"b"))
    assert deaths.poison.digests() == [b"a", b"b"]


def test_deaths_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_DEATHS", 10)
    deaths = Deaths()
    for pid in range(100):
        deaths.handle(ProcessesDied([("worker.1", pid)], [b"a"]))
    assert len(deaths._suspects) == 10
