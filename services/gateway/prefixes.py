"""Prefix-aware routing. No I/O, no clock.

A request goes to the replica that was sent the longest prefix of its prompt, because the prefix
cache there may hold the KV. If the least loaded replica has much less load, the request goes to the
latter. SGLang's router has the same rule with other numbers (sgl-project/sglang, cache_aware
policy). A prompt is stored as hashes of its pieces; each hash is chained to the pieces before it.
"""

from collections import OrderedDict
from collections.abc import Collection, Mapping

import msgspec
import xxhash

from penstock.protocol.messages.client import GenerateRequest
from penstock.protocol.messages.packed import pack

PIECE_BYTES = 256  # bytes of text, or of token ids with 4 bytes each
MAX_PIECES = 1024  # maximum number of hashed pieces per prompt
MAX_KNOWN = 1 << 16  # pieces in the table; the least recently used piece is evicted
MUCH_MORE = 8, 1.5  # the load must exceed another load by this number of requests and this factor


class Prefixes:
    """Prefixes of prompts, with the replicas to which prompts with this prefix were sent."""

    def __init__(self) -> None:
        # chained hash of a piece → replicas
        self._known: OrderedDict[int, frozenset[int]] = OrderedDict()

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

    def __len__(self) -> int:
        return len(self._known)

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
