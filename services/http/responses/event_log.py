"""Events of a response in the background, for streams that begin late or once more."""

import asyncio
import zlib
from collections import deque
from collections.abc import Iterable

from penstock.services.http.shared.errors import ApiError, invalid
from penstock.services.http.shared.event_stream import DONE, Body, EventForm, EventStream

MAX_LOG_BYTES = 1 << 20
"""compressed; the oldest events of a longer stream are dropped"""
_BLOCK_BYTES = 1 << 16
"""of events that are compressed together, to about a fifteenth"""
_LEVEL = 1


class EventLog:
    """Encoded events by their sequence numbers, which start at 0; any number of tasks follow it."""

    is_ready = True
    """as of `EventStream`, in whose place it takes events"""

    def __init__(self) -> None:
        self._num_compressed = 0
        """bytes of the blocks"""
        self._blocks: deque[tuple[int, bytes]] = deque()
        """number of the first event, and events that are compressed"""
        self._newest: list[bytes] = []
        self._first_newest = 0
        self._num_newest_bytes = 0
        self._is_complete = False
        self._changed = asyncio.Event()

    def write(self, bodies: Iterable[Body]) -> None:
        """Add events, and wake those who follow."""
        for event in bodies:
            data = _FORM.encode([event])
            self._newest.append(data)
            self._num_newest_bytes += len(data)
            if self._num_newest_bytes >= _BLOCK_BYTES:
                self._compress()
        self._wake()

    async def send(self, bodies: Iterable[Body], is_last: bool = False) -> None:
        """Add events, of which the last one may end the log."""
        self.write(bodies)
        if is_last:
            self.end()

    def end(self) -> None:
        """Note that no event will be added."""
        self._is_complete = True
        self._wake()

    def check(self, number: int) -> None:
        """Raise ApiError where event `number` was dropped, or does not exist yet."""
        first = self._blocks[0][0] if self._blocks else self._first_newest
        if not first <= number <= self._end:
            expected = f"expected a number from {first - 1} to {self._end - 1}"
            sentence = f"got {number - 1}, {expected}, of the events that are kept"
            raise invalid("starting_after", f"{sentence}; retrieve the response without stream")

    def follow(self, number: int) -> EventStream:
        """Return a stream of the events from `number` on. Raises ApiError as `check`."""
        self.check(number)

        async def send_all(events: EventStream) -> None:
            after = number
            while not (self._is_complete and after == self._end):
                changed = self._changed
                self.check(after)
                if after == self._end:
                    await changed.wait()
                else:
                    data, after = self._piece(after)
                    await events.send_encoded(data)
            await events.send_encoded(DONE, is_last=True)

        return EventStream(_FORM, send_all)

    @property
    def num_bytes(self) -> int:
        return self._num_compressed + self._num_newest_bytes

    @property
    def _end(self) -> int:
        """Number of the next event."""
        return self._first_newest + len(self._newest)

    def _piece(self, number: int) -> tuple[bytes, int]:
        """Return kept events from `number` on, up to a block, and the number after them."""
        if number >= self._first_newest:
            return b"".join(self._newest[number - self._first_newest :]), self._end
        first, data = next(one for one in reversed(self._blocks) if one[0] <= number)
        events = zlib.decompress(data).split(_SEPARATOR)
        return _SEPARATOR.join(events[number - first :]), first + len(events) - 1

    def _compress(self) -> None:
        data = zlib.compress(b"".join(self._newest), _LEVEL)
        self._blocks.append((self._first_newest, data))
        self._first_newest += len(self._newest)
        self._newest, self._num_newest_bytes = [], 0
        self._num_compressed += len(data)
        while self._num_compressed > MAX_LOG_BYTES:
            self._num_compressed -= len(self._blocks.popleft()[1])

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class _LogForm(EventForm):
    """Form of a stream that follows a log; the log itself has the events of a failed answer."""

    def failed(self, error: ApiError) -> Iterable[Body]:
        return [{"type": "error", "code": "server_error", "message": str(error), "param": None}]


_FORM = _LogForm()
_SEPARATOR = b"\n\n"
