"""Workers that outlive their scheduler, and the next one, which adopts their group or ends it."""

from penstock.services.scheduler.workers import LISTENING, MAX_UNHEARD
from tests.services.scheduler.peers.site import Site


def test_group_that_survives_the_scheduler_is_adopted() -> None:
    site = Site()
    members = site.start("w1", "w2", num_blocks=8)
    before = site.assignments[members[0]]
    site.restart_scheduler()
    site.say_hello(*reversed(members))
    assert site.group.members == members
    assert site.group.ready
    after = site.assignments[members[0]]
    assert (after.group, after.rank) == (before.group, 0)
    assert after.epoch == site.group.epoch > before.epoch


def test_group_that_is_not_whole_waits_for_its_members() -> None:
    site = Site()
    members = site.start("w1", "w2", num_blocks=8)
    site.restart_scheduler()
    site.say_hello(members[0])
    assert (site.group.members, site.exits) == ([], [])


def test_group_that_is_not_whole_is_dismissed_when_a_fresh_worker_is_there() -> None:
    site = Site()
    one, two = site.start("w1", "w2", num_blocks=8)
    site.restart_scheduler()
    site.say_hello(one)
    del site.states[two]
    [fresh] = site.start("w2")
    assert site.exits == [one]
    [successor] = site.start("w1")
    assert site.group.members == [fresh, successor]


def test_ranks_that_ran_different_plans_are_dismissed() -> None:
    """The scheduler died when one had a plan that the other one never got."""
    site = Site()
    members = one, two = site.start("w1", "w2", num_blocks=8)
    site.num_plans = {one: 7, two: 6}
    site.restart_scheduler()
    site.say_hello(*members)
    assert sorted(site.exits) == sorted(members)
    assert (site.group.members, site.group.ready) == ([], False)
    successors = site.start("w1", "w2", num_blocks=8)
    assert site.group.members == successors
    assert site.assignments[successors[0]].pids_before == [1, 2]
    assert site.group.ready


def test_an_adopted_group_is_ready_when_every_rank_has_run_all_earlier_plans() -> None:
    """The first state may come before plans that wait at the worker's socket."""
    site = Site()
    one, two = site.start("w1", "w2", num_blocks=8)
    before = site.states[two]
    site.restart_scheduler()
    site.say_hello(one)
    site.group.on_state(two, before)
    assert site.group.members == [one, two]
    assert not site.group.ready
    site.deliver(site.group.heartbeat())
    assert site.group.ready


def test_ranks_whose_others_are_not_heard_are_dismissed() -> None:
    """They wait for this one, for a plan that it never got."""
    site = Site()
    one, two = site.start("w1", "w2", num_blocks=8)
    site.restart_scheduler()
    site.pass_time(MAX_UNHEARD + 2)
    assert site.exits == []
    site.say_hello(one)
    site.pass_time(MAX_UNHEARD)
    assert site.exits == []
    site.pass_time(1)
    assert site.exits == [one]
    del site.states[two]
    successors = site.start("w1", "w2", num_blocks=8)
    assert site.group.members == successors


def test_a_group_is_awaited_as_long_as_it_may_be_adopted() -> None:
    site = Site()
    members = site.start("w1", "w2", num_blocks=8)
    assert not site.group.is_awaited
    site.restart_scheduler()
    assert site.group.is_awaited
    site.say_hello(members[0])
    assert site.group.is_awaited
    site.pass_time(LISTENING)
    assert site.group.is_awaited
    site.pass_time(1)
    assert not site.group.is_awaited


def test_a_fresh_worker_shows_that_there_is_no_group_to_adopt() -> None:
    for num_spares in (0, 1):
        site = Site(num_spares=num_spares)
        site.start("w1")
        assert site.group.is_awaited == (num_spares == 1)
        site.start("w2")
        assert not site.group.is_awaited
