"""The router: assigns requests to replicas, and releases requests that have ended. No clock.

By default a request goes to the replica that was sent the longest prefix of its prompt, because the
prefix cache there may hold the KV. If the least loaded replica has much less load, the request goes
to the latter. SGLang's router has the same rule with other numbers (sgl-project/sglang, cache_aware
policy).
"""

import random
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any, Literal

import msgspec
import xxhash
from msgspec.structs import replace

from penstock.protocol.messages.client import GenerateRequest
from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.pipeline import GatewayStarted, ReleaseRequest
from penstock.protocol.messages.status import SchedulerStatus
from penstock.protocol.transport.channel import MAX_MISSED_HEARTBEATS, Channel
from penstock.services.gateway.request import Request

PIECE_BYTES = 256  # bytes of text, or of token ids with 4 bytes each
MAX_PIECES = 1024  # maximum number of hashed pieces per prompt
MAX_KNOWN = 1 << 16  # pieces in the table; the least recently used piece is evicted
MUCH_MORE = 8, 1.5  # the load must exceed another load by this number of requests and this factor


class Replica:
    """The gateway's view of one replica: a scheduler and its workers."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.first_attempt = 0  # newest `first_attempt` that this gateway has announced
        self.status: SchedulerStatus | None = None
        self.requests: dict[str, Request] = {}
        self.num_assigned = 0  # requests assigned since the gateway's start
        self.num_missed = 0  # heartbeats since the last status
        # whether its status was asked for at the end of a drain, and says that all blocks are saved
        self.is_asked = self.has_saved = False
        self.num_absent = 0  # latest consecutive reports of the supervisor without this scheduler

    def load(self) -> tuple[int, int]:
        """Return a sort key. Replicas with equal numbers of requests take turns."""
        return len(self.requests), self.num_assigned

    @property
    def has_exited(self) -> bool:
        """True if two consecutive reports lack the scheduler: a restart takes less time."""
        return self.num_absent > 1

    @property
    def is_silent(self) -> bool:
        """True if the scheduler has exited or has missed too many heartbeats."""
        return self.has_exited or self.num_missed > MAX_MISSED_HEARTBEATS

    @property
    def runs(self) -> bool:
        """True if the workers are ready: a request assigned to this replica soon gets a token."""
        return bool(self.status and self.status.workers_ready and not self.is_silent)

    @property
    def is_down(self) -> bool:
        """True if the scheduler is silent, or reports that it can't run requests soon."""
        return self.is_silent or bool(self.status and not _runs_soon(self.status))

    @property
    def is_ready(self) -> bool:
        """True if the scheduler is ready, is not silent, and serves no later gateway."""
        status = self.status
        serves_us = status and status.first_attempt <= self.first_attempt
        return bool(status and status.ready and serves_us and not self.is_silent)

    @property
    def awaits_claims(self) -> bool:
        """True if the scheduler may hold an earlier gateway's requests, which clients may claim."""
        return not self.is_silent and self._unclaimed() != []

    def may_have(self, request_id: str) -> bool:
        """Return whether a client may claim this request; True while the answer is unknown."""
        unclaimed = self._unclaimed()
        return not self.is_silent and (unclaimed is None or request_id in unclaimed)

    def _unclaimed(self) -> list[str] | None:
        """Return the ids of unclaimed requests; None until the scheduler knows this gateway."""
        if self.status is None or 0 < self.status.first_attempt < self.first_attempt:
            return None
        return self.status.unclaimed


def _runs_soon(status: SchedulerStatus) -> bool:
    """Return whether steps can run now or soon, with the present KV cache."""
    return status.workers_ready or status.awaits_workers


class Router:
    """All replicas, with the open requests of each replica."""

    def __init__(
        self,
        to_schedulers: list[Channel[Any]],
        routing: Literal["prefix", "load", "random"],
        first_attempt: int = 0,
    ) -> None:
        """Make a router with a channel for each replica, and the first attempt of this gateway."""
        self._replicas = [Replica(index) for index in range(len(to_schedulers))]
        self._to_schedulers = to_schedulers
        self._first_attempt = first_attempt
        self._prefixes = Prefixes()
        self._routing = routing

    @property
    def statuses(self) -> list[SchedulerStatus]:
        """The newest statuses; `ready` is False if a replica does not serve this gateway now."""
        return [  # `unclaimed` is emptied: it has ids of other clients' requests
            replace(replica.status, ready=replica.is_ready, unclaimed=[])
            for replica in self._replicas
            if replica.status
        ]

    @property
    def is_ready(self) -> bool:
        return all(replica.is_ready for replica in self._replicas)

    @property
    def awaits_claims(self) -> bool:
        return any(replica.awaits_claims for replica in self._replicas)

    def may_have(self, request_id: str) -> bool:
        return any(replica.may_have(request_id) for replica in self._replicas)

    def announce_gateway(self, replica: int, first_attempt: int) -> None:
        """Tell a scheduler to serve this gateway, starting at `first_attempt`."""
        self._replicas[replica].first_attempt = first_attempt
        self._to_schedulers[replica].send(GatewayStarted(first_attempt))

    def has_saved(self) -> bool:
        """Return whether what ended requests have left is in files. Ask the schedulers, once."""
        for replica in self._replicas:
            if not replica.is_asked:
                replica.is_asked = True
                self.announce_gateway(replica.index, replica.first_attempt)
        return all(replica.has_saved or replica.is_silent for replica in self._replicas)

    def record_status(self, status: SchedulerStatus) -> bool | None:
        """Record a status. Return whether the scheduler has restarted; None for an old status."""
        if status.replica >= len(self._replicas):
            return None
        replica = self._replicas[status.replica]
        before = replica.status
        if before and status.epoch < before.epoch:
            return None
        is_new = before is None or status.epoch > before.epoch
        if before and (is_new or _runs_soon(before)) and not _runs_soon(status):
            self._prefixes.forget(replica.index)
        replica.status, replica.num_missed = status, 0
        replica.has_saved = replica.is_asked and not status.num_unsaved_blocks
        return is_new

    def record_running(self, running: Collection[int]) -> None:
        """Record the replicas whose scheduler runs, as the supervisor reports."""
        for replica in self._replicas:
            replica.num_absent = 0 if replica.index in running else replica.num_absent + 1
            if replica.has_exited:
                replica.status = None

    def covers_all(self, replicas: set[int]) -> bool:
        return all(replica.index in replicas or replica.is_silent for replica in self._replicas)

    def on_heartbeat(self) -> None:
        """Count missed heartbeats, not seconds, so that a paused gateway finds no peer silent."""
        for replica in self._replicas:
            replica.num_missed += 1

    @property
    def requests(self) -> list[Request]:
        return [request for replica in self._replicas for request in replica.requests.values()]

    def requests_of(self, replica: int) -> list[Request]:
        return list(self._replicas[replica].requests.values())

    def stranded(self) -> list[Request]:
        """Return the requests of replicas that are down; none if no replica runs."""
        if not any(replica.runs for replica in self._replicas):
            return []
        down = [replica for replica in self._replicas if replica.is_down]
        return [request for replica in down for request in replica.requests.values()]

    def assign(self, request: Request) -> None:
        running = [replica for replica in self._replicas if replica.runs] or self._replicas
        if self._routing == "random":
            replica = random.choice(running)  # noqa: S311  no secret
        elif self._routing == "prefix" and len(self._replicas) > 1:
            loads = {replica.index: replica.load() for replica in running}
            replica = self._replicas[self._prefixes.choose(request.message, loads)]
        else:
            replica = min(running, key=Replica.load)
        request.replica = replica.index
        replica.requests[request.request_id] = request
        replica.num_assigned += 1

    def migrate(self, request: Request) -> None:
        """Move a request to a running replica if its own replica is down."""
        before = self._replicas[request.replica]
        if not before.is_down or not any(replica.runs for replica in self._replicas):
            return
        deaths = before.status.num_deaths if before.status else {}
        request.num_deaths = deaths.get(request.request_id, 0)
        request.migrated_from[request.attempt] = before.index
        self.release_migrated(request, request.attempt)
        self.unassign(request)
        self.assign(request)

    def unassign(self, request: Request) -> None:
        self._replicas[request.replica].requests.pop(request.request_id, None)

    def release(self, replica: int, request_id: str, attempt: int) -> None:
        self._to_schedulers[replica].send(ReleaseRequest(request_id, attempt))

    def release_migrated(self, request: Request, attempt: int) -> None:
        """Release an attempt at the replica that the request left in this attempt."""
        if (replica := request.migrated_from.get(attempt)) is not None:
            self.release(replica, request.request_id, attempt)

    def release_everywhere(self, request_id: str, attempt: int) -> None:
        """Release an ended request at all replicas, unless it belongs to an earlier gateway."""
        if attempt >= self._first_attempt:
            for replica in range(len(self._replicas)):
                self.release(replica, request_id, attempt)


class Prefixes:
    """Prefixes of prompts, with the replicas to which prompts with this prefix were sent.

    A prompt is stored as hashes of its pieces; each hash is chained to the pieces before it.
    """

    def __init__(self) -> None:
        # chained hash of a piece → replicas
        self._known: OrderedDict[int, frozenset[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def choose(self, message: GenerateRequest, loads: Mapping[int, tuple[int, int]]) -> int:
        """Choose a replica for a request. Remember the prompt for this replica.

        loads: candidate replica → its number of requests, and a number that breaks ties.
        """
        pieces = pieces_of(message)
        chosen = min(loads, key=loads.__getitem__)
        if having := self.longest(pieces, loads):
            best = min(having, key=loads.__getitem__)
            more, times = MUCH_MORE
            number, fewest = loads[best][0], loads[chosen][0]
            if number <= fewest + more or number <= fewest * times:
                chosen = best
        self.remember(pieces, chosen)
        return chosen

    def longest(self, pieces: list[int], among: Collection[int]) -> frozenset[int]:
        """Return the replicas in `among` that were sent the longest prefix of `pieces`."""
        best: frozenset[int] = frozenset()
        for piece in pieces:
            having = self._known.get(piece, frozenset()).intersection(among)
            if not having:
                break
            best = having
        return best

    def remember(self, pieces: list[int], replica: int) -> None:
        """Add a prompt that was sent to a replica. Evict its first pieces last."""
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


def pieces_of(message: GenerateRequest) -> list[int]:
    """Return the chained hash of each whole piece of the prompt."""
    prompt = message.prompt
    if isinstance(prompt, str):
        data = prompt.encode()
    elif prompt is not None:
        data = pack(prompt)
    else:  # tools come first, as in chat templates
        parts = [message.tools, message.chat_template_kwargs, *(message.messages or ())]
        data = b"".join(map(msgspec.msgpack.encode, parts))
    end = min(len(data) // PIECE_BYTES, MAX_PIECES) * PIECE_BYTES
    pieces: list[int] = []
    before = 0
    for begin in range(0, end, PIECE_BYTES):
        piece = data[begin : begin + PIECE_BYTES]
        pieces.append(before := xxhash.xxh3_64_intdigest(piece, seed=before))
    return pieces
