"""The queue that clients share, against a slow one."""

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocol.fair_queue import FairQueue


class Reference:
    """The same with lists only."""

    def __init__(self) -> None:
        self.items: list[tuple[int, int, str]] = []
        """(priority, item, client)"""
        self.turns: list[str] = []
        self.addresses: list[str] = []

    def add(self, item: int, client: str, priority: int) -> None:
        self.items.append((priority, item, client))
        if client not in self.turns:
            self.turns.append(client)
        if client[0] not in self.addresses:
            self.addresses.append(client[0])

    def first(self, skipped: set[str]) -> int | None:
        for client in sorted(self.turns, key=lambda one: self.addresses.index(one[0])):
            if client not in skipped:
                return min(one for one in self.items if one[2] == client)[1]
        return None

    def remove(self, item: int) -> bool:
        found = [one for one in self.items if one[1] == item]
        self.items = [one for one in self.items if one[1] != item]
        self.turns = [t for t in self.turns if any(t == one[2] for one in self.items)]
        self.addresses = [a for a in self.addresses if any(a == one[0] for one in self.turns)]
        return bool(found)

    def take(self) -> int | None:
        item = self.first(set())
        if item is not None:
            client = next(one[2] for one in self.items if one[1] == item)
            for turns, name in ((self.turns, client), (self.addresses, client[0])):
                turns.append(turns.pop(turns.index(name)))
            self.remove(item)
        return item


clients = st.sampled_from(["a", "b", "c\n1", "c\n2", "c\n3"])
moves = st.one_of(
    st.tuples(st.just("add"), clients, st.integers(-1, 1)),
    st.tuples(st.just("remove"), st.integers(0, 60)),
    st.tuples(st.just("put back"), st.integers(0, 60)),
    st.tuples(st.just("take")),
    st.tuples(st.just("first"), st.sets(clients)),
)


@settings(max_examples=300)
@given(st.lists(moves, max_size=60))
def test_as_the_reference(moves: list[tuple[object, ...]]) -> None:
    queue: FairQueue[int] = FairQueue()
    reference = Reference()
    for number, (name, *arguments) in enumerate(moves):
        arguments = [number, *arguments] if name == "add" else arguments
        if name == "put back":
            if entry := queue.remove(arguments[0]):
                queue.put_back(entry)
                reference.remove(item := entry[2])
                reference.add(item, entry[3], entry[0])
        else:
            results = [getattr(tried, str(name))(*arguments) for tried in (queue, reference)]
            found = bool(results[0]) if name == "remove" else results[0]
            assert found == results[1]
        assert list(queue) == [item for _, item, _ in reference.items]
        assert len(queue) == len(reference.items)
    while reference.items:
        assert queue.take() == reference.take()
    assert queue.take() is None


def test_removed_items_do_not_pile_up() -> None:
    queue: FairQueue[int] = FairQueue()
    queue.add(-1, "a", priority=-1)
    for item in range(1000):
        queue.add(item, "a")
        queue.remove(item)
    assert len(queue._turns["a"]["a"]) == 1
    assert list(queue) == [-1]


def test_many_connections_of_an_address_have_one_turn() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(100):
        queue.add(f"many {number}", f"a\n{number}")
    queue.add("single", "b")
    assert [queue.take() for _ in range(3)] == ["many 0", "single", "many 1"]
