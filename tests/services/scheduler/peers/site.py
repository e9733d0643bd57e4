"""Workers that a test lets come and go."""

from itertools import count

from msgspec.structs import replace

from penstock.protocol.messages.worker import WorkerAssignment, WorkerExit, WorkerState
from penstock.services.scheduler.workers import WorkerGroup, WorkerMessage


class Site:
    """Workers that do what the letters of `WorkerGroup` say."""

    def __init__(self, tp_size: int = 2, num_spares: int = 0, node: str = "") -> None:
        """node: the scheduler's."""
        self.group = WorkerGroup(tp_size, num_spares, node=node)
        self.states: dict[bytes, WorkerState] = {}
        self.assignments: dict[bytes, WorkerAssignment] = {}
        self.exits: list[bytes] = []
        self.num_restarts = 0
        self.num_plans: dict[bytes, int] = {}
        """that members have run before the scheduler's restart"""
        self._numbers = count()

    def start(
        self, *names: str, num_blocks: int = 0, node: str = "", incarnation: int = 0
    ) -> list[bytes]:
        """Register fresh workers; those with `num_blocks` load as soon as they have a place.

        Their pids are the numbers in their names.
        """
        identities = [f"{name}-{next(self._numbers)}".encode() for name in names]
        for name, identity in zip(names, identities, strict=True):
            self.states[identity] = WorkerState(
                name,
                pid=int(name[1:]),
                node=node,
                rendezvous=f"tcp://{name}",
                incarnation=incarnation,
            )
            self.say_hello(identity)
        for identity in identities:
            if num_blocks and identity in self.assignments:
                self.load(identity, num_blocks)
        return identities

    def say_hello(self, *identities: bytes) -> None:
        for identity in identities:
            self.deliver(self.group.on_state(identity, self.states[identity]))

    def load(self, identity: bytes, num_blocks: int, memory_id: int = 0) -> None:
        self.states[identity].num_blocks = num_blocks
        self.states[identity].memory_id = memory_id or self.states[identity].memory_id
        self.say_hello(identity)

    def pass_time(self, num_heartbeats: int, *speakers: bytes) -> list[bytes]:
        """Let only `speakers` send; return the workers that are written to."""
        written_to: list[bytes] = []
        for _ in range(num_heartbeats):
            self.say_hello(*speakers)
            letters = self.group.heartbeat()
            written_to += [identity for identity, _ in letters]
            self.deliver(letters)
        return written_to

    def kill(self, identity: bytes) -> None:
        """Kill a worker, to which no message can be sent."""
        del self.states[identity]
        self.deliver(self.group.lost(identity))

    def deliver(self, letters: list[WorkerMessage]) -> None:
        for identity, letter in letters:
            if isinstance(letter, WorkerExit):
                self.exits.append(identity)
                self.states.pop(identity, None)
            else:
                self.assignments[identity] = letter
                old = self.states[identity]
                is_new = letter.epoch > old.epoch
                self.states[identity] = replace(
                    old,
                    group=letter.group,
                    rank=letter.rank,
                    epoch=letter.epoch,
                    standby=letter.standby,
                )
                if is_new and old.group:
                    self.states[identity].num_plans_before = self.num_plans.get(identity, 0)
                    self.say_hello(identity)

    def restart_scheduler(self) -> None:
        """Restart the scheduler, which knows nothing; the workers live on."""
        self.num_restarts += 1
        spares = self.group._num_expected - self.group.tp_size
        first_epoch = self.num_restarts << 32
        self.group = WorkerGroup(self.group.tp_size, spares, first_epoch=first_epoch)
        self.assignments.clear()
