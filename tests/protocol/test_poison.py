"""The memory of poison requests."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol import poison as module
from penstock.protocol.messages.supervisor import PoisonFound, ProcessesDied, SuspectsCleared
from penstock.protocol.poison import MAX_KNOWN, MEMORY, PoisonList, digest_of
from penstock.protocol.transport.heartbeat import DeathReports
from penstock.protocol.transport.process import SUPERVISOR_VARIABLE


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    one = Clock()
    monkeypatch.setattr(module, "monotonic", one)
    return one


def test_it_is_forgotten_after_its_time(clock: Clock) -> None:
    known = PoisonList()
    known.put(b"a", 2)
    clock.now += MEMORY / 2
    known.put(b"b", 1)
    assert (known.num_deaths(b"a"), known.num_deaths(b"b"), known.num_deaths(b"c")) == (2, 1, 0)
    clock.now += MEMORY / 2
    assert (known.num_deaths(b"a"), known.num_deaths(b"b")) == (0, 1)
    known.put(b"b", 0)
    assert len(known) == 0


def test_the_newest_are_remembered() -> None:
    known = PoisonList()
    for number in range(3 * MAX_KNOWN):
        known.put(b"kept", 3)
        known.put(b"%d" % number, 1)
    assert len(known) == MAX_KNOWN
    assert known.num_deaths(b"kept") == 3


KEYS: list[st.SearchStrategy[str] | st.SearchStrategy[int]] = [st.text(max_size=3), st.integers()]
MAPS = st.one_of(st.dictionaries(keys, st.integers(0, 9), max_size=4) for keys in KEYS)


@given(MAPS, st.randoms())
def test_the_order_of_a_map_does_not_count(fields: dict[Any, int], random: object) -> None:
    names = list(fields)
    random.shuffle(names)  # type: ignore[attr-defined]
    other = {name: fields[name] for name in names}
    assert digest_of("x", [fields]) == digest_of("x", [other])
    assert digest_of("x", [fields]) != digest_of("y", [fields])


def test_only_suspects_are_cleared_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []
    monkeypatch.setenv(SUPERVISOR_VARIABLE, "1")
    channel = SimpleNamespace(send=sent.append)
    context = SimpleNamespace(connect=lambda *_: channel)
    reports = DeathReports(
        SimpleNamespace(context=context, endpoints=SimpleNamespace(supervisor=""))  # type: ignore[arg-type]
    )
    reports.clear([b"a"])
    reports.died([("worker.1", 5)], [b"a", b"b"])
    assert reports.suspects
    reports.clear([b"a", b"c"])
    reports.clear([b"a"])
    reports.found(b"b")
    assert sent == [
        ProcessesDied([("worker.1", 5)], [b"a", b"b"]),
        SuspectsCleared([b"a"]),
        PoisonFound(b"b"),
    ]
