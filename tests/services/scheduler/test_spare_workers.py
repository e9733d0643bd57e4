"""Workers that wait to take the place of those that die."""

from penstock.protocol.messages.worker import WorkerState
from penstock.services.scheduler.workers import LISTENING
from tests.services.scheduler.site import Site


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
        site.hellos[member] = WorkerState(member.decode(), "g", rank, 8, 16)
        site.say_hello(member)
    assert (site.group.members, site.exits) == (members, [])


def test_spares_are_seated_when_nothing_else_is_heard() -> None:
    site = Site(num_spares=1)
    workers = site.start("w1", "w2")
    assert site.group.members == []
    site.pass_time(LISTENING + 1, *workers)
    site.say_hello(*workers)
    assert site.group.members == workers
