"""The order of admission, under clients that want everything."""

from collections import Counter, deque

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.services.scheduler.sequence import Sequence, Status
from penstock.services.scheduler.waiting_queue import WaitingQueue
from tests.services.scheduler.builders import long_prompt, make_sequence
from tests.services.scheduler.simulation import Simulation

CAPACITY = 40
"""tokens that run at once"""


class Pool:
    """Admits what fits; what has run longest ends first."""

    def __init__(self) -> None:
        self.queue = WaitingQueue()
        self.running: deque[Sequence] = deque()
        self.admitted: list[Sequence] = []
        self.held_at: dict[Sequence, int] = {}
        """held sequence → sequences that were admitted before"""
        self.awaits: Counter[Sequence] = Counter()
        """sequence → tokens that it will await of what has run longest; each runs a token a step"""

    @property
    def num_free(self) -> int:
        return CAPACITY - sum(len(one.token_ids) for one in self.running)

    def add(self, length: int, client: str = "", priority: int = 0, awaits: int = 0) -> Sequence:
        sequence = make_sequence([1] * length, client=client, priority=priority)
        self.awaits[sequence] = awaits
        self.queue.add(sequence)
        return sequence

    def step(self) -> None:
        was_idle, had_work = not self.running, len(self.queue)
        for sequence in self.running:
            sequence.num_planned_tokens += 1
        for sequence in self.queue.candidates():
            if (number := self.awaits.pop(sequence, 0)) and self.running:
                other = self.running[0]
                self.queue.await_blocks(sequence, other, other.num_planned_tokens + number)
                continue
            if len(sequence.token_ids) > self.num_free:
                self.queue.hold(sequence)
                if sequence in self.queue._held:
                    self.held_at.setdefault(sequence, len(self.admitted))
                continue
            self.queue.admit(sequence)
            sequence.status = Status.RUNNING
            self.running.append(sequence)
            self.admitted.append(sequence)
        assert self.running or not (was_idle and had_work), "nothing runs, and something waits"

    def end_oldest(self) -> None:
        if self.running:
            self.running.popleft().status = Status.FINISHED

    def run(self) -> None:
        while len(self.queue):
            self.step()
            self.end_oldest()


lengths = st.sampled_from([1, 1, 1, 2, 5, 20, 39, 40])
awaits = st.sampled_from([0, 0, 1, 5])
moves = st.lists(
    st.one_of(
        st.tuples(st.sampled_from("abcd"), st.integers(-1, 1), lengths, awaits),
        st.sampled_from(["step", "step", "end", "abort", "preempt"]),
    ),
    max_size=80,
)


@settings(max_examples=300)
@given(moves)
def test_nobody_starves(moves: list[tuple[str, int, int, int] | str]) -> None:
    """With up to four clients all that waits for blocks is retried in every step."""
    pool = Pool()
    sequences, gone = [], set()
    for move in moves:
        if isinstance(move, tuple):
            sequences.append(pool.add(move[2], move[0], move[1], move[3]))
        elif move == "step":
            pool.step()
        elif move == "end":
            pool.end_oldest()
        elif move == "preempt" and pool.running:
            pool.queue.put_back(victim := pool.running.pop())
            victim.status = Status.WAITING
            pool.admitted.remove(victim)
        elif move == "abort" and len(pool.queue):
            gone.add(victim := list(pool.queue)[len(pool.queue) // 2])
            pool.queue.remove(victim)
    pool.run()
    assert sorted(map(id, pool.admitted)) == sorted(id(s) for s in sequences if s not in gone)


@settings(max_examples=300)
@given(
    st.lists(st.one_of(st.tuples(st.sampled_from("abcd"), lengths, awaits), st.none()), max_size=80)
)
def test_a_held_sequence_is_passed_by_no_more_tokens_than_it_has(
    moves: list[tuple[str, int, int] | None],
) -> None:
    """The last request that passes may be longer than what was left."""
    pool = Pool()
    for move in moves:
        if move:
            pool.add(move[1], move[0], awaits=move[2])
        else:
            pool.end_oldest()
        pool.step()
    pool.run()
    order = {sequence: number for number, sequence in enumerate(pool.held_at)}
    for index, sequence in enumerate(pool.admitted):
        passed = [
            len(one.token_ids)
            for one in pool.admitted[pool.held_at.get(sequence, index) : index]
            if order.get(one, len(order)) > order[sequence]
        ]
        assert sum(passed[:-1]) < len(sequence.token_ids)


def test_what_awaited_blocks_returns_to_its_place() -> None:
    """A client's later sequences come after it, and other clients have their turns."""
    pool = Pool()
    first = pool.add(5)
    pool.step()
    waiting = [pool.add(1, "many", awaits=2) for _ in range(3)]
    pool.step()
    passing = pool.add(1, "many")
    pool.step()
    assert pool.admitted == [first, passing]
    new = [pool.add(1, client) for client in ("many", "other", "other")]
    pool.step()
    order = [pool.admitted.index(sequence) for sequence in [*waiting, new[0]]]
    assert order == sorted(order)
    assert pool.admitted.index(new[2]) < order[2]
    assert len(pool.queue) == 0


def test_what_awaits_blocks_waits_no_longer_than_the_other_runs() -> None:
    pool = Pool()
    first = pool.add(5)
    pool.step()
    waiting = [pool.add(1, "many", awaits=10) for _ in range(20)]
    for _ in range(3):
        pool.step()
    assert pool.admitted == [first] and list(pool.queue) == waiting
    pool.queue.remove(waiting[3])
    pool.end_oldest()
    pool.step()
    assert pool.admitted == [first, *waiting[:3], *waiting[4:]]


def test_what_awaited_blocks_is_held_if_it_lacks_some() -> None:
    pool = Pool()
    pool.add(30)
    pool.step()
    sequence = pool.add(20, awaits=1)
    pool.step()
    assert sequence not in pool.held_at
    pool.step()
    assert sequence in pool.held_at
    pool.run()


def test_a_client_with_a_thousand_sequences_leaves_every_other_place_to_another_one() -> None:
    pool = Pool()
    for _ in range(1000):
        pool.add(1, "many")
    pool.step()
    one = [pool.add(1, "one") for _ in range(5)]
    for _ in range(10):
        pool.end_oldest()
        pool.step()
    assert all(sequence in pool.admitted for sequence in one)
    assert len(pool.admitted) == CAPACITY + 10  # no place stays empty


def test_held_sequences_are_retried_before_new_ones() -> None:
    pool = Pool()
    pool.add(30, "a")
    long = pool.add(20, "b")
    short = pool.add(5, "c")
    pool.step()
    assert pool.admitted[1:] == [short]
    assert list(pool.queue) == [long]
    new = pool.add(15, "c")
    pool.end_oldest()
    pool.step()
    assert pool.admitted[2:] == [long, new]


def test_nothing_passes_a_preempted_sequence() -> None:
    pool = Pool()
    pool.add(30)
    pool.step()
    preempted = make_sequence([1] * 20)
    pool.queue.put_back(preempted)
    pool.add(1, "other")
    pool.step()
    assert len(pool.admitted) == 1
    pool.end_oldest()
    pool.step()
    assert pool.admitted[1] is preempted


def test_a_prompt_that_waits_for_a_whole_chunk_is_not_passed() -> None:
    """Of a hybrid model a chunk has 64 tokens; six are left in the plan."""
    sizes = {"num_blocks": 100, "num_state_blocks": 20, "max_model_len": 300}
    sim = Simulation(max_num_batched_tokens=70, **sizes)  # type: ignore[arg-type]
    prompts = [long_prompt(number, 1000 * number) for number in (64, 100, 5)]
    first, *others = [sim.add(prompt, client=f"{len(prompt)}") for prompt in prompts]
    sim.send()
    assert (sim.scheduler.running, list(sim.scheduler.waiting)) == ([first], others)
