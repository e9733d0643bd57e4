"""Which replica gets which request. No sockets, no clock.

A request goes where the longest beginning of its prompt has been, for its KV may be in that
replica's cache; but to the least loaded one if that has much less to do (the rule, though not the
numbers, of SGLang's router: sgl-project/sglang, cache_aware policy). Prompts are known by hashes of
their pieces, each chained to those before it.
"""

import random
from collections import OrderedDict
from collections.abc import Collection
from typing import Literal

import msgspec
import xxhash
from msgspec.structs import replace

from penstock.protocol.messages.client import GenerateRequest
from penstock.protocol.messages.plan import pack
from penstock.protocol.messages.status import SchedulerStatus
from penstock.protocol.transport.channel import MAX_MISSED_HEARTBEATS
from penstock.services.gateway.entry import Entry

PIECE_BYTES = 256
"""of text, or of token ids of 4 bytes"""
MAX_PIECES = 1024
"""of one prompt that are looked at"""
MAX_KNOWN = 1 << 16
"""pieces that are remembered, those used last"""
MUCH_MORE = 8, 1.5
"""requests, and times as many, that a replica has more than another one"""


class Replica:
    """One scheduler with its workers, as far as the gateway knows."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.first_attempt = 0
        """that its scheduler was sent by this gateway last"""
        self.status: SchedulerStatus | None = None
        self.entries: dict[str, Entry] = {}
        """open requests that it has, by id"""
        self.num_given = 0
        """requests that it has ever had"""
        self.num_missed = 0
        """heartbeats since its last report"""
        self.is_gone = False
        """the supervisor has no scheduler for it that runs"""

    @property
    def is_silent(self) -> bool:
        """It has missed so many that it may be gone."""
        return self.is_gone or self.num_missed > MAX_MISSED_HEARTBEATS

    @property
    def runs(self) -> bool:
        """What it is given gets a token soon."""
        return bool(self.status and self.status.workers_ready and not self.is_silent)

    @property
    def is_ready(self) -> bool:
        """Its scheduler is ready, is heard, and serves no gateway that was started later."""
        status = self.status
        return bool(status and status.ready and not self.is_silent and self.serves_us)

    @property
    def serves_us(self) -> bool:
        """Its scheduler would accept a request of this gateway."""
        return bool(self.status and self.status.first_attempt <= self.first_attempt)

    @property
    def awaits_claims(self) -> bool:
        """Clients may ask for requests that its scheduler has of an earlier gateway."""
        return not self.is_silent and self._unclaimed() != []

    def may_have(self, request_id: str) -> bool:
        """Whether this is one of them; True if they are not known yet."""
        unclaimed = self._unclaimed()
        return not self.is_silent and (unclaimed is None or request_id in unclaimed)

    def _unclaimed(self) -> list[str] | None:
        """As in its status; None until it has heard of this gateway, or of none."""
        if self.status is None or 0 < self.status.first_attempt < self.first_attempt:
            return None
        return self.status.unclaimed

    @property
    def is_down(self) -> bool:
        """It said that it can't run anything, or has said nothing for long."""
        return self.is_silent or bool(self.status and not self.status.workers_ready)


class Prefixes:
    """Which replicas have had which beginnings of prompts."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, frozenset[int]] = OrderedDict()
        """hash of a piece and all before it → replicas"""

    def __len__(self) -> int:
        return len(self._known)

    def longest(self, pieces: list[int], among: Collection[int]) -> frozenset[int]:
        """Those of `among` that have had most of the pieces; none if nobody had the first."""
        best: frozenset[int] = frozenset()
        for piece in pieces:
            having = self._known.get(piece, frozenset()).intersection(among)
            if not having:
                break
            best = having
        return best

    def add(self, pieces: list[int], replica: int) -> None:
        """A replica gets a prompt. Of its pieces the first are forgotten last."""
        for piece in reversed(pieces):
            self._known[piece] = self._known.get(piece, frozenset()) | {replica}
            self._known.move_to_end(piece)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def forget(self, replica: int) -> None:
        """Its cache is empty."""
        for piece, having in list(self._known.items()):
            if having == {replica}:
                del self._known[piece]
            else:
                self._known[piece] = having - {replica}


class Replicas:
    """All replicas, and who has which open request."""

    def __init__(self, number: int, routing: Literal["prefix", "load", "random"]) -> None:
        self._all = [Replica(index) for index in range(number)]
        self._prefixes = Prefixes()
        self._routing = routing

    @property
    def statuses(self) -> list[SchedulerStatus]:
        """The newest reports; `ready` is False in those of replicas that do not serve us now."""
        return [
            replace(one.status, ready=one.is_ready, unclaimed=[])  # not for other clients' eyes
            for one in self._all
            if one.status
        ]

    @property
    def ready(self) -> bool:
        """All are."""
        return all(one.is_ready for one in self._all)

    @property
    def await_claims(self) -> bool:
        """As `Replica.awaits_claims`, of any."""
        return any(one.awaits_claims for one in self._all)

    def may_have(self, request_id: str) -> bool:
        """As `Replica.may_have`, of any."""
        return any(one.may_have(request_id) for one in self._all)

    def introduced(self, replica: int, first_attempt: int) -> None:
        """The scheduler of a replica was sent this number."""
        self._all[replica].first_attempt = first_attempt

    def heard(self, status: SchedulerStatus) -> bool | None:
        """Takes a report. True: its scheduler is a new one, which knows nothing; None: it is of one
        that is gone, or of no replica."""
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

    def reported(self, running: Collection[int]) -> None:
        """The supervisor has schedulers of these that run; of a next one nothing is known yet."""
        for one in self._all:
            one.is_gone = one.index not in running
            if one.is_gone:
                one.status = None

    def are_all(self, heard: set[int]) -> bool:
        """Whether none is left of which anything is to be heard soon."""
        return all(one.index in heard or one.is_silent for one in self._all)

    def on_heartbeat(self) -> None:
        """Counts them: after a time in which the gateway itself was stopped nobody is silent."""
        for one in self._all:
            one.num_missed += 1

    @property
    def all_entries(self) -> list[Entry]:
        """All open requests."""
        return [entry for one in self._all for entry in one.entries.values()]

    def entries(self, replica: int) -> list[Entry]:
        """Open requests that it has."""
        return list(self._all[replica].entries.values())

    def lost(self) -> list[Entry]:
        """Requests of replicas that can't run them, while another one can."""
        if not any(one.runs for one in self._all):
            return []
        return [entry for one in self._all if one.is_down for entry in one.entries.values()]

    def place(self, entry: Entry) -> None:
        """Gives a new request to a replica."""
        pieces = self._pieces(entry.request)
        replica = self._choose(pieces)
        self._prefixes.add(pieces, replica.index)
        entry.replica = replica.index
        replica.entries[entry.request_id] = entry
        replica.num_given += 1

    def place_again(self, entry: Entry) -> int | None:
        """Gives a request to another replica if its own can't run it and that one can. Returns the
        one that it has left; None if it has not."""
        before = self._all[entry.replica]
        if before.runs or not any(one.runs for one in self._all):
            return None
        deaths = before.status.num_deaths if before.status else {}
        entry.num_deaths = deaths.get(entry.request_id, 0)
        self.end(entry)
        self.place(entry)
        return before.index

    def end(self, entry: Entry) -> None:
        """Nothing works at a request any more."""
        self._all[entry.replica].entries.pop(entry.request_id, None)

    def _choose(self, pieces: list[int]) -> Replica:
        running = [one for one in self._all if one.runs] or self._all
        if self._routing == "random":
            return random.choice(running)  # noqa: S311  no secret
        least = min(running, key=_load)
        having = self._prefixes.longest(pieces, [one.index for one in running])
        if having:
            best = min((self._all[index] for index in having), key=_load)
            if not _has_much_more(len(best.entries), len(least.entries)):
                return best
        return least

    def _pieces(self, request: GenerateRequest) -> list[int]:
        """Empty where nobody looks at them."""
        return pieces_of(request) if self._routing == "prefix" and len(self._all) > 1 else []


def pieces_of(request: GenerateRequest) -> list[int]:
    """A hash for each whole piece of the prompt, of that piece and all before it."""
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


def _load(replica: Replica) -> tuple[int, int]:
    """Equals take turns."""
    return len(replica.entries), replica.num_given


def _has_much_more(number: int, least: int) -> bool:
    more, times = MUCH_MORE
    return number > least + more and number > least * times
