"""A queue that clients share in turns: no client waits for all that another one has sent."""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeVar

Item = TypeVar("Item")
_SLACK = 8
"""removed entries that a heap keeps in addition to as many as it has others"""


class FairQueue(Generic[Item]):
    """Round-robin over clients; of one client, by lowest priority value and age.

    Every operation is O(log n), n the items of one client. No I/O, no clock.
    """

    def __init__(self) -> None:
        self._turns: OrderedDict[str, _Client[Item]] = OrderedDict()
        """clients that have items, in the order of their turns"""
        self._entries: dict[Item, tuple[int, int, Item]] = {}
        """(priority, number, item)"""
        self._clients: dict[Item, str] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Item]:
        """Yield items, oldest first."""
        return iter(self._entries)

    def __contains__(self, item: object) -> bool:
        return item in self._entries

    def add(self, item: Item, client: str, priority: int = 0) -> None:
        """Append an item; a client without items gets the last turn."""
        entry = self._entries[item] = (priority, next(self._numbers), item)
        self._clients[item] = client
        if client not in self._turns:
            self._turns[client] = _Client()
        self._turns[client].add(entry)

    def first(self, skipped: Collection[str] = ()) -> Item | None:
        """Return the next item, of the first client in turn that is not skipped."""
        for name, client in self._turns.items():
            if name not in skipped:
                return client.first(self._entries)
        return None

    def take(self) -> Item | None:
        """Remove the next item; its client has had its turn."""
        item = self.first()
        if item is not None:
            client = self._clients[item]
            self.remove(item)
            self.end_turn(client)
        return item

    def remove(self, item: Item) -> bool:
        """Remove an item. Return False if it is not in the queue."""
        if self._entries.pop(item, None) is None:
            return False
        name = self._clients.pop(item)
        if not self._turns[name].remove(self._entries):
            del self._turns[name]
        return True

    def end_turn(self, client: str) -> None:
        """Put a client after all others."""
        if client in self._turns:
            self._turns.move_to_end(client)


class _Client(Generic[Item]):
    """The items of one client: a heap, in which removed entries stay for a while."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Item]] = []
        self._num_items = 0

    def add(self, entry: tuple[int, int, Item]) -> None:
        heappush(self._heap, entry)
        self._num_items += 1

    def first(self, known: dict[Item, tuple[int, int, Item]]) -> Item:
        """`known`: the entries that are not removed; one of them must be here."""
        while known.get((entry := self._heap[0])[2]) is not entry:
            heappop(self._heap)
        return entry[2]

    def remove(self, known: dict[Item, tuple[int, int, Item]]) -> int:
        """Forgets one item that `known` no longer has; returns how many are left."""
        self._num_items -= 1
        if len(self._heap) > 2 * self._num_items + _SLACK:
            self._heap = [entry for entry in self._heap if known.get(entry[2]) is entry]
            heapify(self._heap)
        return self._num_items
