"""Fairness between clients: a queue that they share in turns, and their shares of a limit.

No client waits for all requests of another client. A client's name may have two parts, address and
connection: an address has one turn, and its connections take this turn alternately.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Collection, Iterator
from itertools import count
from typing import Generic, TypeVar

Item = TypeVar("Item")
Entry = tuple[int, int, Item, str]  # (priority, number, item, client)
SEPARATOR = "\n"  # between the parts of a client's name


class FairQueue(Generic[Item]):
    """Queue with round-robin over addresses and their clients; per client by priority and age.

    A lower priority value is handled earlier.

    Operations search in O(log n), where n is the number of a client's items, and move its later
    items in a list. No I/O, no clock.
    """

    def __init__(self) -> None:
        # address → client → its entries, sorted; both in the order of their turns
        self._turns: OrderedDict[str, OrderedDict[str, list[Entry[Item]]]] = OrderedDict()
        self._entries: dict[Item, Entry[Item]] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._entries)

    def __contains__(self, item: object) -> bool:
        return item in self._entries

    def add(self, item: Item, client: str, priority: int = 0) -> None:
        """Append an item; a client without items gets the last turn."""
        self.put_back((priority, next(self._numbers), item, client))

    def put_back(self, entry: Entry[Item]) -> None:
        """Put a removed item to its old place among those of its client."""
        *_, item, client = entry
        self._entries[item] = entry
        clients = self._turns.setdefault(_address(client), OrderedDict())
        insort(clients.setdefault(client, []), entry)

    def first(self, skipped: Collection[str] = ()) -> Item | None:
        """Return the next item, of the first client in turn that is not skipped."""
        turns = ((name, own) for clients in self._turns.values() for name, own in clients.items())
        return next((own[0][2] for name, own in turns if name not in skipped), None)

    def take(self) -> Item | None:
        """Remove and return the next item, which ends its client's turn."""
        item = self.first()
        if item is not None:
            self.end_turn(self._entries[item][-1])
            self.remove(item)
        return item

    def remove(self, item: Item) -> Entry[Item] | None:
        """Remove an item. Return its entry, or None if it is not in the queue."""
        entry = self._entries.pop(item, None)
        if entry is None:
            return None
        client = entry[-1]
        clients = self._turns[_address(client)]
        own = clients[client]
        del own[bisect_left(own, entry)]
        if not own:
            del clients[client]
        if not clients:
            del self._turns[_address(client)]
        return entry

    def end_turn(self, client: str) -> None:
        clients = self._turns.get(_address(client), OrderedDict())
        if client in clients:
            clients.move_to_end(client)
            self._turns.move_to_end(_address(client))


def _address(client: str) -> str:
    return client.partition(SEPARATOR)[0]


RESERVED = 8  # for every N places of a limit, a place is added for clients with few


def exceeds(new: int, own: int, total: int, limit: int) -> bool:
    """Return True if `new` more places exceed the share of a client that has `own` of `total`.

    Up to the limit, a client may have any number. Beyond the limit there are a few more places. A
    client may have as many places as it leaves free: a client that has filled the limit gets none.
    """
    free = limit + -(-limit // RESERVED) - total
    return total + new > limit and not (own < free >= new)
