"""Responses that later requests may continue or retrieve; in memory, within a limit."""

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct

from penstock.services.http.responses.replies import ResponseReply
from penstock.services.http.responses.schema import Item
from penstock.services.http.shared.access import caller
from penstock.services.http.shared.errors import ApiError, invalid
from penstock.services.http.shared.json_response import ENCODER

MAX_BYTES = 64 << 20
# bytes of an entry's objects, and of an item's name, which are not counted one by one
_OVERHEAD = 1024
_DECODER = msgspec.msgpack.Decoder(list[Item])
_WHY = (
    "which is not stored: without store: false, responses are stored in the memory of one http "
    "process until newer ones need their place"
)


class _Entry(Struct):
    key: str  # API key of the client, which alone may use it
    input: bytes  # the conversation up to the output
    output: bytes
    body: bytes  # the response
    names: list[str]  # ids of the output's items

    def num_bytes(self) -> int:
        texts = len(self.input) + len(self.output) + len(self.body)
        return texts + _OVERHEAD * (1 + len(self.names))


class ResponseStore:
    """The responses of one http process, least recently used ones first."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._entries: dict[str, _Entry] = {}
        self._items: dict[str, str] = {}  # id of an item → id of its response

    def put(self, response: ResponseReply, items: Sequence[Item]) -> bool:
        """Keep a response. Return False, and change nothing, where it alone exceeds the limit.

        items: its input, and that of the responses before it.
        """
        output = _DECODER.decode(msgspec.msgpack.encode(response.output))
        entry = _Entry(
            key=caller.get().key,
            input=msgspec.msgpack.encode(items),
            output=msgspec.msgpack.encode(output),
            body=ENCODER.encode(response),
            names=[item.id for item in response.output],
        )
        if entry.num_bytes() > self._max_bytes:
            return False
        self._entries[response.id] = entry
        self._items.update(dict.fromkeys(entry.names, response.id))
        self.num_bytes += entry.num_bytes()
        while self.num_bytes > self._max_bytes:
            self._remove(next(iter(self._entries)))
        return True

    def body(self, response_id: str) -> bytes:
        """Return a response in JSON. Raises ApiError."""
        return self._find(response_id, "response_id").body

    def input_items(self, response_id: str) -> list[Item]:
        """Return the conversation up to the output of a response. Raises ApiError."""
        return _DECODER.decode(self._find(response_id, "response_id").input)

    def items(self, response_id: str) -> list[Item]:
        """Return the conversation up to the end of a response. Raises ApiError."""
        entry = self._find(response_id, "previous_response_id", "previous_response_not_found")
        return _DECODER.decode(entry.input) + _DECODER.decode(entry.output)

    def resolved(self, items: Iterable[Item]) -> list[Item]:
        """Return items with those that references name, each once. Raises ApiError."""
        found, kept = [], dict[str, Item]()
        used = set[str]()
        for number, item in enumerate(items):
            if item.type == "item_reference":
                name, path = item.id or "", f"input[{number}].id"
                if name in used:
                    raise invalid(path, f"got {name!r:.200} again, expected one reference to it")
                used.add(name)
                if name not in kept:
                    kept |= self._output(name, path)
                item = kept[name]
            found.append(item)
        return found

    def remove(self, response_id: str) -> None:
        """Forget a response. Raises ApiError."""
        self._find(response_id, "response_id")
        self._remove(response_id)

    def _find(self, response_id: str, field: str, code: str | None = None) -> _Entry:
        entry = self._entries.get(response_id)
        if entry is None or entry.key != caller.get().key:
            status = 400 if code else 404
            raise ApiError(status, f"{field}: got {response_id!r:.200}, {_WHY}", field, code)
        self._entries[response_id] = self._entries.pop(response_id)
        return entry

    def _output(self, name: str, path: str) -> dict[str, Item]:
        """Return the items of the output that has this one, by id."""
        response_id = self._items.get(name, "")
        entry = self._entries.get(response_id)
        if entry is None or entry.key != caller.get().key:
            problem = "which is not kept: send the item itself, or leave out store: false"
            raise ApiError(404, f"{path}: got {name!r:.200}, {problem}", path)
        self._entries[response_id] = self._entries.pop(response_id)
        return dict(zip(entry.names, _DECODER.decode(entry.output), strict=True))

    def _remove(self, response_id: str) -> None:
        if entry := self._entries.pop(response_id, None):
            self.num_bytes -= entry.num_bytes()
            for name in entry.names:
                self._items.pop(name, None)
