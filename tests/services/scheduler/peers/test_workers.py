"""The group of workers: its ranks, spare workers, nodes, and groups of an earlier scheduler."""

from itertools import groupby, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.protocol.messages.worker import WorkerAssignment, WorkerState
from penstock.protocol.transport.channel import MAX_MISSED_HEARTBEATS
from penstock.services.scheduler.workers import LISTENING, MAX_UNHEARD
from tests.services.scheduler.peers.site import Site

# ---- Workers that come, load, die and come back, and the group they make ---------------------


def test_group_is_seated_when_enough_workers_are_there() -> None:
    site = Site()
    first, second = [site.start("w1"), site.start("w2")]
    assert site.group.members == first + second
    one, two = site.assignments.values()
    assert (one.rank, two.rank, one.tp_size) == (0, 1, 2)
    assert (one.group, one.epoch, one.rendezvous) == (two.group, two.epoch, two.rendezvous)
    assert one.rendezvous == "tcp://w1"
    assert not one.spans_nodes
    assert site.group.names == ["w1", "w2"]


def test_one_worker_of_two_waits() -> None:
    site = Site()
    site.start("w1")
    assert (site.group.members, site.group.epoch, site.assignments) == ([], 0, {})
    assert not site.group.ready


def test_group_is_ready_when_all_have_loaded() -> None:
    site = Site()
    one, two = site.start("w1", "w2")
    site.load(two, 90)
    assert not site.group.ready
    site.load(one, 100)
    assert site.group.ready
    assert site.group.num_blocks == 90


def test_heartbeats_change_nothing() -> None:
    site = Site()
    members = site.start("w1", "w2", num_blocks=8)
    assert [site.group.on_state(m, site.states[m]) for m in members] == [[], []]
    assert site.group.ready


def test_spare_worker_waits() -> None:
    site = Site()
    members = site.start("w1", "w2", num_blocks=8)
    [spare] = site.start("w3")
    assert site.group.members == members
    assert spare not in site.assignments
    site.kill(spare)
    assert (site.group.members, site.exits) == (members, [])


def test_loss_of_a_member_ends_the_group_and_a_spare_takes_part_in_the_next() -> None:
    site = Site()
    one, two = site.start("w1", "w2", num_blocks=8)
    [spare] = site.start("w3")
    old_epoch = site.group.epoch
    site.kill(one)
    assert site.exits == [two]
    assert (site.group.members, site.group.epoch, site.group.ready) == ([], 0, False)
    [successor] = site.start("w2")
    assert site.group.members == [spare, successor]
    assert site.group.epoch > old_epoch


def test_loss_of_an_unknown_worker_is_nothing() -> None:
    site = Site()
    site.start("w1", "w2")
    assert site.group.lost(b"nobody") == []
    assert len(site.group.members) == 2


def test_successor_of_a_member_ends_its_group() -> None:
    """The old one died without anybody seeing it."""
    site = Site()
    _, two = site.start("w1", "w2", num_blocks=8)
    [successor] = site.start("w1")
    assert site.exits == [two]
    assert site.group.members == []
    [other] = site.start("w2")
    assert site.group.members == [successor, other]


def test_one_that_was_started_earlier_is_no_successor() -> None:
    """Its machine was cut off, and is back when others are in its place."""
    site = Site()
    members = site.start("w1", "w2", num_blocks=8, incarnation=5)
    [returned] = site.start("w1", incarnation=4)
    assert site.exits == [returned]
    assert site.group.members == members
    assert site.group.ready
    site.kill(members[0])
    assert site.group.names == []


def test_successor_of_a_waiting_worker_takes_its_place() -> None:
    site = Site()
    site.start("w1", "w1")
    assert site.group.members == []


def test_dismissed_worker_is_not_seated_again() -> None:
    """The worker's last heartbeat comes after the loss of the group."""
    site = Site()
    one, two = site.start("w1", "w2", num_blocks=8)
    last_heartbeat = site.states[two]
    site.kill(one)
    site.deliver(site.group.on_state(two, last_heartbeat))
    [first] = site.start("w1")
    site.say_hello(first)
    assert site.group.members == []
    [second] = site.start("w2")
    assert site.group.members == [first, second]


def test_one_worker_is_a_group() -> None:
    site = Site(tp_size=1)
    members = site.start("w1", num_blocks=8)
    assert site.group.members == members
    assert site.group.ready


def test_rank_0_tells_the_size_of_blocks_and_how_long_its_gpu_waits() -> None:
    site = Site()
    assert site.group.idle_us == (0.0, 0.0)
    first, second = [site.start("w1"), site.start("w2")]
    site.states[first[0]].block_size = site.states[second[0]].block_size = 64
    site.states[first[0]].idle_us = (1.5, 9.0)
    site.load(first[0], 5)
    site.load(second[0], 7)
    assert (site.group.leader.block_size, site.group.num_blocks) == (64, 5)
    assert site.group.idle_us == (1.5, 9.0)


# ---- silence ---------------------------------------------------------------------------------


def test_silent_worker_without_a_place_is_forgotten() -> None:
    """So that it is not given one when another comes, and that nothing grows for ever."""
    site = Site()
    [gone] = site.start("w1")
    site.pass_time(MAX_MISSED_HEARTBEATS)
    assert gone in site.group._states
    site.pass_time(1)
    assert not site.group._states
    assert not len(site.group._peers)
    [first] = site.start("w2")
    assert site.group.members == []
    site.say_hello(gone)
    assert site.group.members == [first, gone]


def test_worker_that_is_heard_is_not_forgotten() -> None:
    site = Site()
    members = site.start("w1", "w2", num_blocks=8)
    [spare] = site.start("w3")
    assert spare not in site.pass_time(3 * MAX_MISSED_HEARTBEATS, *members, spare)
    site.kill(members[0])
    [other] = site.start("w4")
    assert site.group.members == [spare, other]


def test_members_are_told_their_places_again() -> None:
    """One may be at a long step; whether it is there shows when it is written to."""
    site = Site()
    members = _, two = site.start("w1", "w2", num_blocks=8)
    before = dict(site.assignments)
    site.assignments.clear()
    assert site.pass_time(MAX_MISSED_HEARTBEATS + 2, two) == members * (MAX_MISSED_HEARTBEATS + 2)
    assert site.group.members == members
    assert site.group.ready
    assert site.assignments == before


def test_nobody_is_written_to_when_there_is_no_group_any_more() -> None:
    """Not even a dismissed worker whose last heartbeat comes after the loss of the group."""
    site = Site()
    one, two = site.start("w1", "w2", num_blocks=8)
    last_heartbeat = site.states[two]
    site.kill(one)
    site.deliver(site.group.on_state(two, last_heartbeat))
    assert site.pass_time(MAX_MISSED_HEARTBEATS + 1) == []


def test_no_epoch_comes_twice_and_later_ones_are_larger() -> None:
    """Also over a restart of the scheduler, for a worker drops what is of an earlier epoch."""
    site = Site(tp_size=1)
    epochs = []
    for number in range(6):
        if number == 3:
            site.restart_scheduler()
        [member] = site.start(f"w{number}", num_blocks=8)
        epochs.append(site.group.epoch)
        site.kill(member)
    assert epochs == sorted(set(epochs))
    assert 0 < epochs[0] < 100, "of no clock"


def test_a_group_has_the_memory_of_the_last_one_if_every_rank_has() -> None:
    for memory_after, is_kept in ((7, 8), True), ((7, 9), False), ((0, 8), False):
        site = Site()
        first = site.start("w1", "w2")
        for identity, memory in zip(first, (7, 8), strict=True):
            site.states[identity].memory_id = memory
            site.load(identity, 5)
        assert not site.group.has_memory  # the first group
        site.kill(first[0])
        for identity, memory in zip(site.start("w3", "w4"), memory_after, strict=True):
            site.states[identity].memory_id = memory
            site.load(identity, 5)
        assert site.group.ready
        assert site.group.has_memory == is_kept


def test_workers_without_lasting_memory_have_none_of_the_last_group() -> None:
    site = Site(tp_size=1)
    [first] = site.start("w1", num_blocks=5)
    site.kill(first)
    site.start("w2", num_blocks=5)
    assert site.group.ready
    assert not site.group.has_memory


# ---- Workers that wait to take the place of those that die -----------------------------------


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


# ---- Groups of workers on several machines, and the messages to them -------------------------


def seat(nodes: str, tp_size: int, own: str) -> tuple[str, list[WorkerAssignment]]:
    """Return the node of each rank, and its message, when workers of all `nodes` are heard.

    The workers are w0, w1, …; own: the scheduler's node.
    """
    site = Site(tp_size, len(nodes) - tp_size, own)
    for number, node in enumerate(nodes):
        site.start(f"w{number}", node=node)
    members = site.group.members
    seated = "".join(site.states[member].node for member in members)
    return seated, [site.assignments[member] for member in members]


@pytest.mark.parametrize(
    ("nodes", "tp_size", "own", "seated"),
    [
        ("abab", 2, "b", "bb"),
        ("abbcc", 2, "a", "bb"),  # rather with each other than with the scheduler
        ("babcbc", 4, "a", "abbb"),
        ("bcacba", 4, "a", "aabb"),
        ("aabbb", 4, "z", "bbba"),
        ("ba", 1, "a", "a"),
    ],
)
def test_ranks_of_a_node_are_neighbours(nodes: str, tp_size: int, own: str, seated: str) -> None:
    assert seat(nodes, tp_size, own)[0] == seated


@given(st.text("abc", min_size=4, max_size=12), st.sampled_from([1, 2, 4]), st.sampled_from("abcd"))
def test_groups_stay_on_a_node_that_can_hold_them(nodes: str, tp_size: int, own: str) -> None:
    seated, told = seat(nodes, tp_size, own)
    assert len(seated) == tp_size
    runs = [node for node, _ in groupby(seated)]
    assert len(runs) == len(set(runs))
    assert {one.spans_nodes for one in told} == {len(runs) > 1}
    if any(nodes.count(node) >= tp_size for node in nodes):
        assert len(runs) == 1
    if nodes.count(own) >= tp_size or (own in nodes and len(runs) > 1):
        assert seated[0] == own


def test_ranks_meet_where_rank_0_can_listen() -> None:
    _, told = seat("ab", 2, "b")
    assert [one.rendezvous for one in told] == ["tcp://w1"] * 2


def test_only_pids_of_the_own_node_are_waited_for() -> None:
    site = Site(2, 3, "a")
    one, _ = site.start("w1", "w2", node="a")
    [three] = site.start("w3", node="b")
    [four, five] = site.start("w4", "w5", node="c")
    site.kill(one)
    assert site.group.members == [four, five]
    assert [site.assignments[worker].pids_before for worker in (four, five)] == [[], []]
    site.kill(five)
    [six] = site.start("w6", node="c")
    assert site.group.members == [three, six]
    assert [site.assignments[worker].pids_before for worker in (three, six)] == [[], [4, 5]]


# ---- Workers that outlive their scheduler, and the next one, which adopts their group or ends it


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
