"""Routing by prefix: a prompt goes where its beginning has been. No I/O, no clock.

A request goes to the replica that had the longest beginning of its prompt, whose cache may hold its
KV; but to the least loaded replica if that one has much less to do (the rule, though not the
numbers, of SGLang's router: sgl-project/sglang, cache_aware policy). Prompts are known by hashes of
their pieces, each chained to the pieces before it.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping

import msgspec
import xxhash

from penstock.protocol.messages.client import GenerateRequest
from penstock.protocol.messages.packed import pack

PIECE_BYTES = 256  # of text, or of token ids of 4 bytes
MAX_PIECES = 1024  # of one prompt that are hashed
MAX_KNOWN = 1 << 16  # pieces that are remembered, the most recently used
MUCH_MORE = 8, 1.5  # requests, and factor, by which the load of one replica exceeds that of another


class Prefixes:
    """Beginnings of prompts, and the replicas that have had each."""

    def __init__(self) -> None:
        # hash of a piece and all before it → replicas
        self._known: OrderedDict[int, frozenset[int]] = OrderedDict()

    def choose(self, message: GenerateRequest, loads: Mapping[int, tuple[int, int]]) -> int:
        """Return the replica for a request, which has its prompt from now on.

        loads: requests of each replica that may get it, and a number by which equals take turns.
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


def pieces_of(message: GenerateRequest) -> list[int]:
    """Return a hash for each whole piece of the prompt, of that piece and all before it."""
    prompt = message.prompt
    if isinstance(prompt, str):
        data = prompt.encode()
    elif prompt is not None:
        data = pack(prompt)
    else:  # tools first, as in chat templates
        parts = [message.tools, message.chat_template_kwargs, *(message.messages or ())]
        data = b"".join(map(msgspec.msgpack.encode, parts))
    end = min(len(data) // PIECE_BYTES, MAX_PIECES) * PIECE_BYTES
    pieces: list[int] = []
    before = 0
    for begin in range(0, end, PIECE_BYTES):
        piece = data[begin : begin + PIECE_BYTES]
        pieces.append(before := xxhash.xxh3_64_intdigest(piece, seed=before))
    return pieces
