"""The tensor-parallel worker group: its members by rank, spare workers and failover."""

from itertools import count

from xxhash import xxh3_64_intdigest

from penstock.protocol.messages.packed import unpack
from penstock.protocol.messages.worker import (
    CompileGrammars,
    WorkerAssignment,
    WorkerExit,
    WorkerState,
)
from penstock.protocol.transport.peers import Peers

# (identity of the worker, message)
WorkerMessage = tuple[bytes, WorkerAssignment | WorkerExit | CompileGrammars]

LISTENING = 2  # heartbeats that a restarted scheduler waits for an existing worker group
# Heartbeats that a restarted scheduler waits for missing ranks of an existing group. Missing ranks
# may hang in a collective, if only some ranks have received the last plan.
MAX_UNHEARD = 4


class WorkerGroup:
    """The worker group and its spare workers. No sockets: methods return the messages to send.

    A group is complete when every rank has a worker, and ready when every rank has loaded its
    model. A group that loses a member is dissolved, because collectives need all ranks. After a
    restart of the scheduler, an existing group keeps its ranks. Workers beyond `tp_size` are
    spares, for failover.
    """

    def __init__(
        self,
        tp_size: int,
        num_spares: int = 0,
        replica: int = 0,
        node: str = "",
        first_epoch: int = 1,
    ) -> None:
        """Expect `tp_size` workers and `num_spares` spare workers.

        node: the scheduler's own node, as in `WorkerState.node`. first_epoch: a positive number
        above all epochs of earlier schedulers.
        """
        self._epochs = count(first_epoch)
        self.tp_size = tp_size
        self._node = node
        self._replica = replica
        self._num_expected = tp_size + num_spares
        self._num_heartbeats = self._num_unheard = 0
        self._had_group = self._is_adopted = False
        self.epoch = 0  # epoch of this group's plans; 0 while there is no group
        self.ready = False  # True if plans may be sent
        self.members: list[bytes] = []  # identities by rank; empty while there is no group
        # identities of the standby group by rank; empty while there is no standby group
        self.standby: list[bytes] = []
        self._states: dict[bytes, WorkerState] = {}  # newest state of each worker
        self._peers: Peers[None, None] = Peers()
        self._assignments: list[WorkerMessage] = []  # latest assignments of the members
        self._standby_assignments: list[WorkerMessage] = []
        self._num_blocks_before = 0  # number of blocks of the last ready group
        # members of the last group, which may still hold its memory
        self.members_before: list[WorkerState] = []
        self._memory_id_before = 0  # `memory_id` of the last ready group

    def __str__(self) -> str:
        memory = ", with the KV of the last ones" if self.has_memory else ""
        return ", ".join(self.names) + memory

    @property
    def num_blocks(self) -> int:
        """Number of KV blocks on every rank."""
        return min(self._states[member].num_blocks for member in self.members)

    @property
    def num_state_blocks(self) -> int:
        """Number of state blocks on every rank; 0 for a model without recurrent state."""
        return min(self._states[member].num_state_blocks for member in self.members)

    @property
    def state_ranges(self) -> list[tuple[int, int]]:
        """Positions (first, last) of each state block after which all ranks can continue."""
        ranks = [unpack(self._states[member].kept_states) for member in self.members]
        firsts = (max(numbers) for numbers in zip(*(rank[::2] for rank in ranks), strict=False))
        lasts = (min(numbers) for numbers in zip(*(rank[1::2] for rank in ranks), strict=False))
        return list(zip(firsts, lasts, strict=True))

    @property
    def leader(self) -> WorkerState:
        """The state of rank 0. Sizes of blocks, steps and tiles are the same on every rank."""
        return self._states[self.members[0]]

    @property
    def has_memory(self) -> bool:
        """True if every rank has the KV memory of the last ready group."""
        return self.memory_id != 0 and self.memory_id == self._memory_id_before

    @property
    def memory_id(self) -> int:
        """The id of the KV memory of all ranks; 0 if any rank's memory ends with its worker."""
        ids = [self._states[member].memory_id for member in self.members]
        return 0 if 0 in ids else xxh3_64_intdigest(repr(ids).encode()) >> 1

    @property
    def host_tier(self) -> tuple[int, int, int]:
        """(Host slots of every rank, slots of a state block, id of the memory of all ranks).

        There are 0 slots until all ranks have slots.
        """
        states = [self._states[member] for member in self.members]
        memory_id = (
            xxh3_64_intdigest(repr([state.host_memory_id for state in states]).encode()) >> 1
        )
        return min(state.host_slots for state in states), states[0].num_pieces, memory_id

    @property
    def is_awaited(self) -> bool:
        """True while the group of an earlier scheduler may still be adopted."""
        num_fresh = sum(not state.group for state in self._states.values())
        is_whole = num_fresh <= self._num_expected - self.tp_size
        is_listening = not self._had_group and self._num_heartbeats <= LISTENING and is_whole
        return not self.ready and (is_listening or self._is_adopted)

    @property
    def idle_us(self) -> tuple[float, float]:
        """Idle times of rank 0's GPU between steps, in microseconds; 0 while there is no group."""
        return self.leader.idle_us if self.members else (0.0, 0.0)

    @property
    def names(self) -> list[str]:
        return [self._states[member].name for member in self.members]

    def on_state(self, identity: bytes, state: WorkerState) -> list[WorkerMessage]:
        """Record the state of a worker. Assign ranks if a group is complete.

        If two workers have the same name, the earlier worker is lost: it was killed unnoticed, or
        its machine was unreachable.
        """
        messages: list[WorkerMessage] = []
        for other, known in list(self._states.items()):
            if other == identity or known.name != state.name:
                continue
            if state.incarnation < known.incarnation:
                return self._dismiss([identity], f"another {state.name} was started later")
            messages += self.lost(other)
        if identity in self.standby:  # the worker may not know its assignment yet
            old = self._states[identity]
            state.group, state.rank, state.standby = old.group, old.rank, True
        self._states[identity] = state
        self._peers.alive(identity, state.name)
        if not self.members:
            return messages + self._seat()
        return messages + self._check_ready() + self._seat_standby()

    def lost(self, identity: bytes) -> list[WorkerMessage]:
        """Remove a lost worker. Dissolve its group; spare workers form the next group."""
        if identity in self.members:
            name = self._states[identity].name
            return self._dissolve(f"{name} exited or is unreachable", identity)
        self._forget(identity)
        if identity not in self.standby:
            return []
        rest = [member for member in self.standby if member != identity]
        self.standby, self._standby_assignments = [], []
        return self._dismiss(rest, "a rank of its standby group was lost") + self._seat_standby()

    def heartbeat(self) -> list[WorkerMessage]:
        """Return the members' assignments again, at each heartbeat.

        Repeated assignments change nothing, but the send fails for an unreachable worker. A worker
        in a long step stays reachable. Workers outside of a group are forgotten after
        MAX_MISSED_HEARTBEATS intervals. Ranks of an earlier scheduler's group are dismissed after
        MAX_UNHEARD intervals without the missing ranks.
        """
        self._num_heartbeats += 1
        for identity in set(self._peers.silent()).difference(self.members, self.standby):
            self._forget(identity)
        ranks = [identity for identity, state in self._states.items() if state.group]
        if self._had_group:
            ranks = []
        self._num_unheard = self._num_unheard + 1 if ranks else 0
        if self._num_unheard > MAX_UNHEARD:
            return self._dismiss(ranks, "another rank of its group is not heard")
        return self._assignments + self._standby_assignments

    def _check_ready(self) -> list[WorkerMessage]:
        """Set `ready` if all ranks are loaded. Dissolve an adopted group with unequal plans.

        An earlier scheduler may have died when only some ranks had received a plan. These ranks
        wait in a collective, and would mix it up with the first collective of the next epoch.
        """
        states = [self._states[member] for member in self.members]
        has_begun = not self._is_adopted or all(state.epoch == self.epoch for state in states)
        if has_begun and len({state.num_plans_before for state in states}) > 1:
            return self._dissolve("its group's ranks have got different plans")
        self.ready = has_begun and all(state.num_blocks and not state.standby for state in states)
        return []

    def _dissolve(self, reason: str, lost: bytes = b"") -> list[WorkerMessage]:
        """Dissolve the group, of which a member may be `lost`. Spares form the next group."""
        if self.ready:
            self._num_blocks_before, self._memory_id_before = self.num_blocks, self.memory_id
        self.members_before = [self._states[member] for member in self.members]
        self._forget(lost)
        rest = [member for member in self.members if member != lost]
        self.members, self.epoch, self._assignments = [], 0, []
        self.ready = self._is_adopted = False
        return self._dismiss(rest, reason) + self._seat()

    def _forget(self, identity: bytes) -> None:
        self._states.pop(identity, None)
        self._peers.lost(identity)

    def _dismiss(self, identities: list[bytes], reason: str) -> list[WorkerMessage]:
        for identity in identities:
            self._forget(identity)
        return [(identity, WorkerExit(reason)) for identity in identities]

    def _seat(self) -> list[WorkerMessage]:
        """Adopt an existing complete group, or form a group of workers without a group."""
        fresh = [identity for identity, state in self._states.items() if not state.group]
        # A spare worker may register before a group that outlived the scheduler.
        all_heard = (
            len(self._states) >= self._num_expected
            or self._num_heartbeats > LISTENING
            or self._had_group
        )
        # a standby group may be heard before the group whose memory it shares
        groups = {state.group: state.standby for state in self._states.values() if state.group}
        for group in sorted(groups, key=lambda group: groups[group]):
            ranks = {
                state.rank: identity
                for identity, state in self._states.items()
                if state.group == group
            }
            if set(ranks) == set(range(self.tp_size)) and (all_heard or not groups[group]):
                return self._assign([ranks[rank] for rank in range(self.tp_size)], group)
            if fresh and all_heard:  # a member was restarted, so the group stays incomplete
                return self._dismiss(list(ranks.values()), f"group {group} is not whole")
        if len(fresh) < self.tp_size or not all_heard:
            return []
        return self._assign(self._neighbours(fresh), "")

    def _neighbours(self, fresh: list[bytes]) -> list[bytes]:
        """Choose `tp_size` workers, in rank order, preferably on one node.

        Prefer nodes with enough workers, then the scheduler's node, then nodes with more workers.
        """
        on_node: dict[str, list[bytes]] = {}
        for identity in fresh:
            on_node.setdefault(self._states[identity].node, []).append(identity)
        nodes = sorted(
            on_node,
            key=lambda node: (
                len(on_node[node]) < self.tp_size,
                node != self._node,
                -len(on_node[node]),
            ),
        )
        return [identity for node in nodes for identity in on_node[node]][: self.tp_size]

    def _seat_standby(self) -> list[WorkerMessage]:
        """Let spare workers prepare to take over the memory of the ready group."""
        if self.standby or not self.ready or not self.memory_id:
            return []
        rest = [identity for identity in self._states if identity not in self.members]
        groups = {self._states[identity].group for identity in rest} - {""}
        fresh = [identity for identity in rest if not self._states[identity].group]
        if groups:  # a standby group of an earlier scheduler; all its ranks will register
            fresh = [identity for identity in rest if self._states[identity].group]
            fresh.sort(key=lambda identity: self._states[identity].rank)
        if len(fresh) < self.tp_size:
            return []
        self.standby = fresh if groups else self._neighbours(fresh)
        epoch = next(self._epochs)
        group = max(groups, default=str(epoch))
        self._standby_assignments = self._places(self.standby, epoch, group, standby=True)
        for rank, identity in enumerate(self.standby):
            state = self._states[identity]
            state.group, state.rank, state.standby = group, rank, True
        return self._standby_assignments

    def _assign(self, members: list[bytes], group: str) -> list[WorkerMessage]:
        self.epoch = next(self._epochs)
        self.members = members
        self.standby, self._standby_assignments = [], []
        self._had_group, self._is_adopted = True, group != "" and self.tp_size > 1
        self._check_ready()
        self._assignments = self._places(members, self.epoch, group or str(self.epoch))
        return self._assignments

    def _places(
        self, members: list[bytes], epoch: int, group: str, *, standby: bool = False
    ) -> list[WorkerMessage]:
        rendezvous = self._states[members[0]].rendezvous
        nodes = [self._states[member].node for member in members]
        before = [worker for worker in self.members_before if worker.pid > 0]
        return [
            (
                member,
                WorkerAssignment(
                    epoch,
                    group,
                    rank,
                    tp_size=self.tp_size,
                    rendezvous=rendezvous,
                    num_blocks=self._num_blocks_before,
                    pids_before=[worker.pid for worker in before if worker.node == node],
                    replica=self._replica,
                    spans_nodes=len(set(nodes)) > 1,
                    standby=standby,
                ),
            )
            for rank, (member, node) in enumerate(zip(members, nodes, strict=True))
        ]
