"""The router: assigns each request to a replica, and releases it there. No clock.

A request goes to the replica that had the longest beginning of its prompt, whose cache may hold its
KV; but to the least loaded replica if that one has much less to do (the rule, though not the
numbers, of SGLang's router: sgl-project/sglang, cache_aware policy). Prompts are known by hashes of
their pieces, each chained to the pieces before it.
"""

import random
from collections import OrderedDict
from collections.abc import Collection
from typing import Any, Literal

import msgspec
import xxhash
from msgspec.structs import replace

from penstock.protocol.messages.client import GenerateRequest
from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.scheduler import GatewayStarted, ReleaseRequest
from penstock.protocol.messages.status import SchedulerStatus
from penstock.protocol.transport.channel import MAX_MISSED_HEARTBEATS, Channel
from penstock.services.gateway.entry import Entry

PIECE_BYTES = 256
"""of text, or of token ids of 4 bytes"""
MAX_PIECES = 1024
"""of one prompt that are hashed"""
MAX_KNOWN = 1 << 16
"""pieces that are remembered, the most recently used"""
MUCH_MORE = 8, 1.5
"""requests, and factor, by which the load of one replica exceeds that of another"""


class Replica:
    """One scheduler with its workers, as far as the gateway knows."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.first_attempt = 0
        """that this gateway has sent its scheduler last"""
        self.status: SchedulerStatus | None = None
        self.entries: dict[str, Entry] = {}
        self.num_given = 0
        """requests that were ever assigned to it"""
        self.num_missed = 0
        """heartbeats since its last status"""
        self.has_exited = False

    def load(self) -> tuple[int, int]:
        """Return a key by which equally loaded replicas take turns."""
        return len(self.entries), self.num_given

    @property
    def is_silent(self) -> bool:
        """Its scheduler has exited, or has missed too many heartbeats."""
        return self.has_exited or self.num_missed > MAX_MISSED_HEARTBEATS

    @property
    def runs(self) -> bool:
        """A request that is assigned to it gets a token soon."""
        return bool(self.status and self.status.workers_ready and not self.is_silent)

    @property
    def is_down(self) -> bool:
        """The scheduler is silent, or has reported that it can't run anything."""
        return self.is_silent or bool(self.status and not self.status.workers_ready)

    @property
    def is_ready(self) -> bool:
        """Its scheduler is ready, not silent, and serves no gateway that was started later."""
        status = self.status
        serves_us = status and status.first_attempt <= self.first_attempt
        return bool(status and status.ready and serves_us and not self.is_silent)

    @property
    def awaits_claims(self) -> bool:
        """Its scheduler has requests of an earlier gateway, which clients may claim."""
        return not self.is_silent and self._unclaimed() != []

    def may_have(self, request_id: str) -> bool:
        """Return whether a client may claim this request; True if that is not known yet."""
        unclaimed = self._unclaimed()
        return not self.is_silent and (unclaimed is None or request_id in unclaimed)

    def _unclaimed(self) -> list[str] | None:
        """As in its status; None until its scheduler knows this gateway, or none."""
        if self.status is None or 0 < self.status.first_attempt < self.first_attempt:
            return None
        return self.status.unclaimed


class Prefixes:
    """Beginnings of prompts, and the replicas that have had each."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, frozenset[int]] = OrderedDict()
        """hash of a piece and all before it → replicas"""

    def __len__(self) -> int:
        return len(self._known)

    def longest(self, pieces: list[int], among: Collection[int]) -> frozenset[int]:
        """Return the replicas, of `among`, that have had most of the pieces."""
        best: frozenset[int] = frozenset()
        for piece in pieces:
            having = self._known.get(piece, frozenset()).intersection(among)
            if not having:
                break
            best = having
        return best

    def remember(self, pieces: list[int], replica: int) -> None:
        """Add a prompt of a replica. Its first pieces are forgotten last."""
        for piece in reversed(pieces):
            self._known[piece] = self._known.get(piece, frozenset()) | {replica}
            self._known.move_to_end(piece)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def forget(self, replica: int) -> None:
        for piece, having in list(self._known.items()):
            if having == {replica}:
                del self._known[piece]
            else:
                self._known[piece] = having - {replica}


class Router:
    """All replicas, and the open requests of each."""

    def __init__(
        self,
        to_schedulers: list[Channel[Any]],
        routing: Literal["prefix", "load", "random"],
        first_attempt: int = 0,
    ) -> None:
        """to_schedulers: one a replica. first_attempt: of this gateway."""
        self._all = [Replica(index) for index in range(len(to_schedulers))]
        self._to_schedulers = to_schedulers
        self._first_attempt = first_attempt
        self._prefixes = Prefixes()
        self._routing = routing

    @property
    def statuses(self) -> list[SchedulerStatus]:
        """The newest ones; `ready` is False where the replica does not serve this gateway now."""
        return [
            replace(one.status, ready=one.is_ready, unclaimed=[])  # not for other clients' eyes
            for one in self._all
            if one.status
        ]

    @property
    def is_ready(self) -> bool:
        return all(one.is_ready for one in self._all)

    @property
    def awaits_claims(self) -> bool:
        return any(one.awaits_claims for one in self._all)

    def may_have(self, request_id: str) -> bool:
        return any(one.may_have(request_id) for one in self._all)

    def introduce(self, replica: int, first_attempt: int) -> None:
        """Have a scheduler serve this gateway, from this attempt on."""
        self._all[replica].first_attempt = first_attempt
        self._to_schedulers[replica].send(GatewayStarted(first_attempt))

    def take_status(self, status: SchedulerStatus) -> bool | None:
        """Record a status. True: its scheduler has restarted; None: the status is outdated."""
        if status.replica >= len(self._all):
            return None
        replica = self._all[status.replica]
        before = replica.status
        if before and status.epoch < before.epoch:
            return None
        is_new = before is None or status.epoch > before.epoch
        if before and (is_new or before.workers_ready > status.workers_ready):
            self._prefixes.forget(replica.index)
        replica.status, replica.num_missed = status, 0
        return is_new

    def take_running(self, running: Collection[int]) -> None:
        """Record which replicas have a scheduler that runs, as the supervisor reports."""
        for one in self._all:
            one.has_exited = one.index not in running
            if one.has_exited:
                one.status = None

    def covers_all(self, replicas: set[int]) -> bool:
        return all(one.index in replicas or one.is_silent for one in self._all)

    def on_heartbeat(self) -> None:
        """Count heartbeats, not seconds: a gateway that was stopped itself finds nobody silent."""
        for one in self._all:
            one.num_missed += 1

    @property
    def entries(self) -> list[Entry]:
        return [entry for one in self._all for entry in one.entries.values()]

    def entries_of(self, replica: int) -> list[Entry]:
        return list(self._all[replica].entries.values())

    def stranded(self) -> list[Entry]:
        """Return requests of replicas that can't run them, while another one can."""
        if not any(one.runs for one in self._all):
            return []
        return [entry for one in self._all if one.is_down for entry in one.entries.values()]

    def assign(self, entry: Entry) -> None:
        is_used = self._routing == "prefix" and len(self._all) > 1
        pieces = pieces_of(entry.request) if is_used else []
        replica = self._choose(pieces)
        self._prefixes.remember(pieces, replica.index)
        entry.replica = replica.index
        replica.entries[entry.request_id] = entry
        replica.num_given += 1

    def migrate(self, entry: Entry) -> int | None:
        """Leave a replica that can't run the request for one that can. Return the replica left."""
        before = self._all[entry.replica]
        if before.runs or not any(one.runs for one in self._all):
            return None
        deaths = before.status.num_deaths if before.status else {}
        entry.num_deaths = deaths.get(entry.request_id, 0)
        self.unassign(entry)
        self.assign(entry)
        return before.index

    def unassign(self, entry: Entry) -> None:
        self._all[entry.replica].entries.pop(entry.request_id, None)

    def release(self, replica: int, request_id: str, attempt: int) -> None:
        self._to_schedulers[replica].send(ReleaseRequest(request_id, attempt))

    def release_left(self, entry: Entry, attempt: int) -> None:
        """Release an attempt at a replica that the request has left."""
        if (replica := entry.left.get(attempt)) is not None:
            self.release(replica, entry.request_id, attempt)

    def release_everywhere(self, request_id: str, attempt: int) -> None:
        """Release a request that has ended, unless it is of an earlier gateway."""
        if attempt >= self._first_attempt:
            for replica in range(len(self._all)):
                self.release(replica, request_id, attempt)

    def _choose(self, pieces: list[int]) -> Replica:
        running = [one for one in self._all if one.runs] or self._all
        if self._routing == "random":
            return random.choice(running)  # noqa: S311  no secret
        least = min(running, key=Replica.load)
        having = self._prefixes.longest(pieces, [one.index for one in running])
        if having:
            best = min((self._all[index] for index in having), key=Replica.load)
            more, times = MUCH_MORE
            number, fewest = len(best.entries), len(least.entries)
            if number <= fewest + more or number <= fewest * times:
                return best
        return least


def pieces_of(request: GenerateRequest) -> list[int]:
    """Return a hash for each whole piece of the prompt, of that piece and all before it."""
    prompt = request.prompt
    if isinstance(prompt, str):
        data = prompt.encode()
    elif prompt is not None:
        data = pack(prompt)
    else:  # tools first, as in chat templates
        parts = [request.tools, request.chat_template_kwargs, *(request.messages or ())]
        data = b"".join(map(msgspec.msgpack.encode, parts))
    end = min(len(data) // PIECE_BYTES, MAX_PIECES) * PIECE_BYTES
    pieces: list[int] = []
    before = 0
    for begin in range(0, end, PIECE_BYTES):
        piece = data[begin : begin + PIECE_BYTES]
        pieces.append(before := xxhash.xxh3_64_intdigest(piece, seed=before))
    return pieces
