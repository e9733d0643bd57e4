"""Workers that come, load, die and come back, and the group they make."""

from itertools import count

from penstock.protocol.messages import WorkerAssignment, WorkerExit, WorkerHello
from penstock.services.scheduler.workers import Letter, WorkerGroup


class Site:
    """Workers that do what the letters of `WorkerGroup` say."""

    def __init__(self, tp_size: int = 2) -> None:
        self.group = WorkerGroup(tp_size)
        self.hellos: dict[bytes, WorkerHello] = {}
        self.assignments: dict[bytes, WorkerAssignment] = {}
        self.exits: list[bytes] = []
        self._numbers = count()

    def start(self, *names: str, num_blocks: int = 0) -> list[bytes]:
        """Fresh workers say hello; those with `num_blocks` load as soon as they have a place."""
        identities = [f"{name}-{next(self._numbers)}".encode() for name in names]
        for name, identity in zip(names, identities, strict=True):
            self.hellos[identity] = WorkerHello(name)
            self.say_hello(identity)
        for identity in identities:
            if num_blocks and identity in self.assignments:
                self.load(identity, num_blocks)
        return identities

    def say_hello(self, *identities: bytes) -> None:
        for identity in identities:
            self.deliver(self.group.hello(identity, self.hellos[identity]))

    def load(self, identity: bytes, num_blocks: int) -> None:
        self.hellos[identity].num_blocks = num_blocks
        self.say_hello(identity)

    def kill(self, identity: bytes) -> None:
        """A worker dies, and a message to it can't be sent."""
        del self.hellos[identity]
        self.deliver(self.group.lost(identity))

    def deliver(self, letters: list[Letter]) -> None:
        for identity, letter in letters:
            if isinstance(letter, WorkerExit):
                self.exits.append(identity)
                self.hellos.pop(identity, None)
            else:
                self.assignments[identity] = letter
                old = self.hellos[identity]
                self.hellos[identity] = WorkerHello(
                    old.name, letter.group, letter.rank, old.num_blocks
                )

    def restart_scheduler(self) -> None:
        """It knows nothing; the workers live on."""
        self.group = WorkerGroup(self.group.tp_size)
        self.assignments.clear()


def test_group_is_seated_when_enough_workers_are_there() -> None:
    site = Site()
    first, second = [site.start("w1"), site.start("w2")]
    assert site.group.members == first + second
    one, two = site.assignments.values()
    assert (one.rank, two.rank, one.tp_size) == (0, 1, 2)
    assert (one.group, one.epoch, one.rendezvous) == (two.group, two.epoch, two.rendezvous)
    assert one.rendezvous.startswith("tcp://127.0.0.1:")
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
    assert [site.group.hello(m, site.hellos[m]) for m in members] == [[], []]
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


def test_successor_of_a_waiting_worker_takes_its_place() -> None:
    site = Site()
    site.start("w1", "w1")
    assert site.group.members == []


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
    del site.hellos[two]
    [fresh] = site.start("w2")
    assert site.exits == [one]
    [successor] = site.start("w1")
    assert site.group.members == [fresh, successor]


def test_dismissed_worker_is_not_seated_again() -> None:
    """Its last heartbeat comes behind the loss of the group."""
    site = Site()
    one, two = site.start("w1", "w2", num_blocks=8)
    last_heartbeat = site.hellos[two]
    site.kill(one)
    site.deliver(site.group.hello(two, last_heartbeat))
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
    site.hellos[first[0]].block_size = site.hellos[second[0]].block_size = 64
    site.hellos[first[0]].idle_us = (1.5, 9.0)
    site.load(first[0], 5)
    site.load(second[0], 7)
    assert (site.group.block_size, site.group.num_blocks) == (64, 5)
    assert site.group.idle_us == (1.5, 9.0)
