"""Workers that come, load, die and come back, and the group they make."""

from penstock.protocol.transport.channel import MAX_MISSED_HEARTBEATS
from tests.services.scheduler.peers.site import Site


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
    assert (site.group.block_size, site.group.num_blocks) == (64, 5)
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
