"""A queue that clients share in turns: no client waits for all that another one has sent."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Collection, Iterator
from itertools import count
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Round-robin over clients; of one client, by lowest priority value and age.

    Operations search in O(log n), n the items of one client, and move the later ones in its list.
    No I/O, no clock.
    """

    def __init__(self) -> None:
        self._turns: OrderedDict[str, list[tuple[int, int, Item, str]]] = OrderedDict()
        """client → its entries, sorted; in the order of their turns"""
        self._entries: dict[Item, tuple[int, int, Item, str]] = {}
        """(priority, number, item, client)"""
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._entries)

    def __contains__(self, item: object) -> bool:
        return item in self._entries

    def add(self, item: Item, client: str, priority: int = 0) -> None:
        """Append an item; a client without items gets the last turn."""
        entry = self._entries[item] = (priority, next(self._numbers), item, client)
        insort(self._turns.setdefault(client, []), entry)

    def first(self, skipped: Collection[str] = ()) -> Item | None:
        """Return the next item, of the first client in turn that is not skipped."""
        return next((own[0][2] for name, own in self._turns.items() if name not in skipped), None)

    def take(self) -> Item | None:
        """Remove the next item; its client has had its turn."""
        item = self.first()
        if item is not None:
            self.end_turn(self._entries[item][-1])
            self.remove(item)
        return item

    def remove(self, item: Item) -> bool:
        """Remove an item. Return False if it is not in the queue."""
        entry = self._entries.pop(item, None)
        if entry is None:
            return False
        client = entry[-1]
        own = self._turns[client]
        del own[bisect_left(own, entry)]
        if not own:
            del self._turns[client]
        return True

    def end_turn(self, client: str) -> None:
        if client in self._turns:
            self._turns.move_to_end(client)
