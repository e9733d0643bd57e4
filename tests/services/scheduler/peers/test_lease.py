"""Time in which a new gateway may claim running requests."""

from types import SimpleNamespace
from typing import Any

from penstock.services.scheduler.process import Lease

REQUESTS: list[Any] = [SimpleNamespace(attempt=n) for n in (5, 6, 7, 8)]


def expired(lease: Lease, now: float) -> list[int]:
    return [one.attempt for one in lease.take_expired(REQUESTS, now)]


def test_a_lease_ends_once() -> None:
    lease = Lease(30.0)
    assert expired(lease, 1e9) == []
    lease.begin(7, now=100.0)
    assert lease.first_attempt == 7
    found = [expired(lease, now) for now in (100.0, 129.9, 130.0, 130.5)]
    assert found == [[], [], [5, 6], []]


def test_what_is_not_claimed_is_known_while_the_lease_lasts() -> None:
    lease = Lease(30.0)
    assert lease.unclaimed(REQUESTS) == []
    lease.begin(7, now=100.0)
    assert lease.unclaimed(REQUESTS) == REQUESTS[:2]
    assert expired(lease, 130.0)
    assert lease.unclaimed(REQUESTS) == []


def test_a_second_gateway_begins_another_lease() -> None:
    lease = Lease(30.0)
    lease.begin(7, now=100.0)
    lease.begin(9, now=120.0)
    assert lease.first_attempt == 9
    assert [expired(lease, now) for now in (130.0, 150.0)] == [[], [5, 6, 7, 8]]


def test_late_news_of_an_earlier_gateway_changes_nothing() -> None:
    lease = Lease(30.0)
    lease.begin(9, now=100.0)
    for first_attempt in (7, 9):
        lease.begin(first_attempt, now=120.0)
    assert lease.first_attempt == 9
    assert expired(lease, 130.0) == [5, 6, 7, 8]
