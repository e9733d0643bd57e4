"""Workers that wait to take the place of those that die."""

from itertools import permutations

import pytest
from msgspec.structs import replace

from penstock.protocol.messages.worker import WorkerState
from penstock.services.scheduler.workers import LISTENING
from tests.services.scheduler.peers.site import Site


def test_spares_take_the_place_of_a_lost_group_at_once_with_its_size() -> None:
    site = Site(num_spares=2)
    one, two, three, four = site.start("w1", "w2", "w3", "w4")
    site.load(one, 9)
    site.load(two, 8)
    assert site.assignments[one].num_blocks == 0
    site.kill(one)
    assert site.group.members == [three, four]
    told = site.assignments[four]
    assert (told.num_blocks, told.pids_before) == (8, [1, 2])


def test_group_of_which_nothing_is_known_has_no_pids() -> None:
    site = Site(tp_size=1, num_spares=1)
    one, two = site.start("w0", "w2")
    site.kill(one)
    assert (site.assignments[two].num_blocks, site.assignments[two].pids_before) == (0, [])


def test_spares_that_are_heard_first_do_not_end_a_group_that_survived_the_scheduler() -> None:
    site = Site(num_spares=2)
    members = [f"w{rank}".encode() for rank in range(2)]
    for name in ("w3", "w4"):
        site.start(name)
    for rank, member in enumerate(members):
        site.states[member] = WorkerState(member.decode(), "g", rank, 8, 16)
        site.say_hello(member)
    assert (site.group.members, site.exits) == (members, [])


def test_spares_are_seated_when_nothing_else_is_heard() -> None:
    site = Site(num_spares=1)
    workers = site.start("w1", "w2")
    assert site.group.members == []
    site.pass_time(LISTENING + 1, *workers)
    site.say_hello(*workers)
    assert site.group.members == workers


def with_standby(tp_size: int) -> tuple[Site, list[bytes], list[bytes]]:
    """Return a site with a group that is ready, and a standby group that is prepared."""
    site = Site(tp_size, num_spares=tp_size)
    members = site.start(*(f"w{1 + rank}" for rank in range(tp_size)))
    spares = site.start(*(f"w{1 + tp_size + rank}" for rank in range(tp_size)))
    for number, member in enumerate(members):
        assert site.group.standby == []  # there is no memory to share
        site.load(member, 9, memory_id=number + 1)
    assert site.group.standby == spares
    for number, spare in enumerate(spares):
        site.load(spare, 9, memory_id=number + 1)
    return site, members, spares


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_standby_group_continues_when_it_has_taken_over(tp_size: int) -> None:
    site, members, spares = with_standby(tp_size)
    prepared = [site.assignments[spare] for spare in spares]
    assert [(one.standby, one.rank) for one in prepared] == [(True, i) for i in range(tp_size)]
    assert (site.group.ready, site.group.members) == (True, members)
    letters = site.group.lost(members[0])
    assert (site.group.members, site.group.standby) == (spares, [])
    assert not site.group.ready  # it may still wait for the end of its predecessors
    site.deliver(letters)
    site.say_hello(*spares)
    assert site.group.ready
    assert site.group.has_memory
    taken = [site.assignments[spare] for spare in spares]
    for now, before in zip(taken, prepared, strict=True):
        assert not now.standby
        assert (now.group, now.rank, now.pids_before) == (
            before.group,
            before.rank,
            list(range(1, tp_size + 1)),
        )
        assert now.epoch > before.epoch
    fresh = site.start(*(f"w{1 + rank}" for rank in range(tp_size)))
    assert site.group.standby == fresh


def test_a_standby_group_that_is_called_before_it_has_reported_its_group() -> None:
    site = Site(1, num_spares=1)
    [member, spare] = site.start("w1", "w2")
    state = replace(site.states[spare])
    site.load(member, 9, memory_id=1)
    group = site.assignments[spare].group
    site.deliver(site.group.on_state(spare, state))  # was on its way
    site.kill(member)
    assert (site.assignments[spare].group, site.assignments[spare].standby) == (group, False)
    assert not site.group.ready


def test_workers_without_memory_that_lasts_have_no_standby_group() -> None:
    site = Site(1, num_spares=1)
    [member, spare] = site.start("w1", "w2")
    site.load(member, 9)
    assert spare not in site.assignments


@pytest.mark.parametrize("num_spares", [1, 3])
def test_spares_that_make_no_whole_group_wait(num_spares: int) -> None:
    site = Site(2, num_spares=num_spares)
    members = site.start("w1", "w2")
    spares = site.start(*(f"w{3 + number}" for number in range(num_spares)))
    num_standby = num_spares // 2 * 2
    for member in members:
        site.load(member, 9, memory_id=1)
    assert site.group.standby == spares[:num_standby]
    assert [spare for spare in spares if spare in site.assignments] == spares[:num_standby]


def test_a_standby_group_that_loses_a_rank_is_dismissed_and_the_group_continues() -> None:
    site, members, spares = with_standby(2)
    site.kill(spares[1])
    assert site.exits == [spares[0]]
    assert (site.group.members, site.group.ready, site.group.standby) == (members, True, [])
    fresh = site.start("w3", "w4")
    assert site.group.standby == fresh


@pytest.mark.parametrize("tp_size", [1, 2])
def test_after_the_scheduler_both_groups_keep_their_parts(tp_size: int) -> None:
    """Whichever is heard first: the standby group shares memory that is in use."""
    for order in permutations(range(2 * tp_size)):
        site, members, spares = with_standby(tp_size)
        site.restart_scheduler()
        everyone = [*members, *spares]
        for number in order:
            site.say_hello(everyone[number])
        site.pass_time(1, *everyone)
        assert (site.group.members, site.group.standby) == (members, spares)
        assert site.group.ready
        assert site.exits == []
        assert site.assignments[spares[0]].standby
        site.kill(members[0])
        site.say_hello(*spares)
        assert (site.group.members, site.group.ready) == (spares, True)


def test_a_standby_group_that_alone_outlives_the_scheduler_takes_over() -> None:
    site, members, spares = with_standby(1)
    site.restart_scheduler()
    del site.states[members[0]]
    site.pass_time(LISTENING + 1, *spares)
    site.say_hello(*spares)
    assert (site.group.members, site.group.standby) == (spares, [])
    assert not site.assignments[spares[0]].standby
