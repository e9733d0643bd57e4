"""Numbers that tell which of two processes was started later."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.transport.peers import Peers
from penstock.protocol.transport.process import (
    COUNTER_FILE,
    INCARNATION_VARIABLE,
    Identity,
    first_number,
    take_incarnation,
)


@pytest.fixture(autouse=True)
def _no_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INCARNATION_VARIABLE, raising=False)


def test_without_a_supervisor_the_run_folder_counts(tmp_path: Path) -> None:
    assert [take_incarnation(tmp_path) for _ in range(12)] == list(range(1, 13))
    assert (tmp_path / COUNTER_FILE).stat().st_mode & 0o777 == 0o600


def test_processes_that_start_at_once_have_different_numbers(tmp_path: Path) -> None:
    """Each call opens the file, so that locks hold between threads as between processes."""
    with ThreadPoolExecutor(16) as pool:
        numbers = list(pool.map(take_incarnation, [tmp_path] * 400))
    assert sorted(numbers) == list(range(1, 401))


def test_the_supervisor_s_number_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INCARNATION_VARIABLE, "41")
    assert take_incarnation(tmp_path) == 41
    assert not (tmp_path / COUNTER_FILE).exists()


@given(st.integers(1, 1 << 30), st.integers(1, 1 << 30), st.integers(0, (1 << 32) - 1))
def test_a_later_one_s_numbers_are_above_all_of_an_earlier_one(a: int, b: int, used: int) -> None:
    earlier, later = sorted((a, b))
    if earlier < later:
        assert 0 < first_number(earlier) + used < first_number(later) < sys.maxsize


@given(st.text("a.1/é", max_size=9), st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_an_identity_is_what_it_was(name: str, pid: int, incarnation: int) -> None:
    identity = Identity(name, pid, incarnation)
    assert Identity.decode(identity.encode()) == identity


@pytest.mark.parametrize("routing_id", [b"", b"t", b"a/b/c", b"\xff/1", b"x/1/-2", b"a/1/\xb2"])
def test_any_routing_id_is_a_name(routing_id: bytes) -> None:
    assert Identity.decode(routing_id).pid == 0


def test_predecessors_are_earlier_incarnations_of_the_same_name() -> None:
    ids = [Identity(*one).encode() for one in (("t", 9, 1), ("t", 8, 3), ("u", 7, 1), ("t", 5, 2))]
    peers: Peers[None, None] = Peers()
    for identity in ids:
        peers.alive(identity, "")
    assert [peers.predecessors(one) for one in ids] == [[], [ids[0], ids[3]], [], [ids[0]]]
