"""Responses that later requests may continue, retrieve or cancel; in memory, within a limit."""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from penstock.services.http.responses.event_log import MAX_LOG_BYTES, EventLog
from penstock.services.http.responses.replies import ResponseReply
from penstock.services.http.responses.schema import Item
from penstock.services.http.shared.access import caller
from penstock.services.http.shared.errors import ApiError, invalid
from penstock.services.http.shared.json_response import ENCODER

MAX_BYTES = 64 << 20
_OVERHEAD = 1024
"""bytes of an entry's objects, and of an item's name, which are not counted one by one"""
_DECODER = msgspec.msgpack.Decoder(list[Item])
_WHY = (
    "which is not stored: responses are stored with store: true, in the memory of one http "
    "process, until newer ones need their place"
)


class _Entry(Struct):
    key: str
    """API key of the client, which alone may use it"""
    input: bytes
    """the conversation up to the output"""
    output: bytes
    body: bytes
    """the response; empty if it was not to be stored, so that only its items can be referenced"""
    names: list[str]
    """ids of the output's items"""
    is_background: bool
    is_running: bool
    """keeps a place for the error that it may end with"""
    log: EventLog | None
    """of a stream in the background"""
    log_bytes: int
    """for which it has a place"""

    def num_bytes(self) -> int:
        texts = len(self.input) + len(self.output) + len(self.body) + self.log_bytes
        return texts + _OVERHEAD * (1 + len(self.names) + self.is_running)


class ResponseStore:
    """The responses of one http process, least recently used ones first."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._entries: dict[str, _Entry] = {}
        self._items: dict[str, str] = {}
        """id of an item → id of its response"""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """of responses that are being made in the background"""

    def put(
        self, response: ResponseReply, items: Sequence[Item], log: EventLog | None = None
    ) -> None:
        """Keep a response; items: its input, and that of the responses before it.

        Of a response that is not stored, only the output is kept, for references. Responses that
        are being made are not evicted. Raises ApiError for one that has no place in addition to
        them, and changes nothing.
        """
        output = _DECODER.decode(msgspec.msgpack.encode(response.output))
        entry = _Entry(
            key=caller.get().key,
            input=msgspec.msgpack.encode(items if response.store else []),
            output=msgspec.msgpack.encode(output),
            body=ENCODER.encode(response) if response.store else b"",
            names=[item.id for item in response.output],
            is_background=response.background,
            is_running=response.status == "in_progress",
            log=log,
            log_bytes=_log_bytes(log, response),
        )
        self._check_room(response.id, entry.num_bytes())
        self._remove(response.id)
        self._entries[response.id] = entry
        self._items.update(dict.fromkeys(entry.names, response.id))
        self.num_bytes += entry.num_bytes()
        while self.num_bytes > self._max_bytes:
            kept = {response.id, *self._tasks}
            self._remove(next(name for name in self._entries if name not in kept))

    def body(self, response_id: str) -> bytes:
        """Return a response in JSON. Raises ApiError."""
        return self._find(response_id, "response_id").body

    def log(self, response_id: str) -> EventLog:
        """Return the events of a response. Raises ApiError for one without a log."""
        if log := self._find(response_id, "response_id").log:
            return log
        problem = "expected false: this response was not made with background and stream: true"
        raise invalid("stream", f"got true, {problem}")

    def input_items(self, response_id: str) -> list[Item]:
        """Return the conversation up to the output of a response. Raises ApiError."""
        return _DECODER.decode(self._find(response_id, "response_id").input)

    def items(self, response_id: str) -> list[Item]:
        """Return the conversation up to the end of a response. Raises ApiError."""
        entry = self._find(response_id, "previous_response_id", "previous_response_not_found")
        if response_id in self._tasks:
            problem = f"got {response_id!r}, which is in progress; wait until it has ended"
            raise ApiError(400, f"previous_response_id: {problem}", "previous_response_id")
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

    async def remove(self, response_id: str) -> None:
        """Forget a response, and end its generation. Raises ApiError."""
        self._find(response_id, "response_id")
        if task := self._tasks.get(response_id):
            task.cancel()
            await asyncio.wait([task])
        self._remove(response_id)

    def run(self, response_id: str, work: Coroutine[Any, Any, None]) -> None:
        """Make a response in the background."""
        task = self._tasks[response_id] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(response_id, None))

    async def cancel(self, response_id: str) -> None:
        """End a generation in the background, if it is running. Raises ApiError."""
        if not self._find(response_id, "response_id").is_background:
            problem = f"got {response_id!r}, expected a response that has background: true"
            raise invalid("response_id", problem)
        if task := self._tasks.get(response_id):
            task.cancel()
            await asyncio.wait([task])

    async def stop(self) -> None:
        """End all generations in the background."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _check_room(self, response_id: str, num_bytes: int) -> None:
        most = self._max_bytes
        if num_bytes > most:
            sentence = f"the response and its input have {num_bytes} bytes, expected at most {most}"
            raise ApiError(413, f"{sentence}; it can't be stored")
        running = (self._tasks.keys() & self._entries.keys()) - {response_id}
        if num_bytes + sum(self._entries[name].num_bytes() for name in running) > most:
            sentence = "responses in the background have no place left; wait until some have ended"
            raise ApiError(429, sentence, None, "rate_limit_exceeded", {"Retry-After": "1"})

    def _find(self, response_id: str, field: str, code: str | None = None) -> _Entry:
        entry = self._entries.get(response_id)
        if entry is None or not entry.body or entry.key != caller.get().key:
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


def _log_bytes(log: EventLog | None, response: ResponseReply) -> int:
    """Return the bytes of a log: the most it may have, or with the event that will be its last."""
    if log is None:
        return 0
    is_running = response.status == "in_progress"
    return MAX_LOG_BYTES if is_running else log.num_bytes + len(ENCODER.encode(response))
