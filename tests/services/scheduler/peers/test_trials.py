"""Streams that kill detokenizers are found, and the others have all their tokens."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocol.poison import MAX_DEATHS
from penstock.services.scheduler.poison import TRIAL_BATCH
from penstock.services.scheduler.sequence import Sequence
from tests.services.scheduler.desk import Desk, Reader


class Hall(Desk):
    """Readers of which each confirms what it is to, and dies at the streams of `poison`."""

    def __init__(self, number: int = 1) -> None:
        super().__init__()
        self.poison: set[str] = set()
        self.given_up: list[str] = []
        self.num_deaths = self.num_readers = 0
        for _ in range(number):
            self.start()

    def start(self) -> None:
        self.num_readers += 1
        self.come(f"d{self.num_readers}")

    def die(self, identity: bytes) -> None:
        self.num_deaths += 1
        del self.readers[identity]
        _, given_up = self.streams.lost(identity, has_died=True)
        for sequence in given_up:
            self.given_up.append(sequence.request_id)
            self.streams.close(sequence)
        self.start()

    def settle(self) -> None:
        """Until nobody has anything to say."""
        while messages := list(self.streams.take_messages()):
            for identity, delta in messages:
                if identity not in self.readers:
                    continue
                reader: Reader = self.readers[identity]
                reader.read(delta)
                if self.poison.intersection(one.request_id for one in delta.opened):
                    self.die(identity)
                elif delta.confirm:
                    self.streams.confirmed(identity)

    def tokens_of(self, sequence: Sequence) -> list[int]:
        """As its reader has them; nobody else has any."""
        having = [
            one.tokens[sequence.stream_id]
            for one in self.readers.values()
            if sequence.stream_id in one.tokens
        ]
        assert len(having) == 1
        return having[0]


def started(hall: Hall, number: int) -> list[Sequence]:
    """Sequences that have a token, and their readers, too."""
    sequences = hall.open(number)
    for index, sequence in enumerate(sequences):
        sequence.request_id = f"r{index}"
    hall.step(sequences, 1)
    hall.settle()
    return sequences


def test_the_one_that_kills_is_given_up() -> None:
    hall = Hall()
    sequences = started(hall, 2 * TRIAL_BATCH)
    hall.poison = {"r70"}
    hall.die(b"d1")
    hall.step(sequences, 2)
    hall.settle()
    assert hall.given_up == ["r70"]
    assert hall.num_deaths == 1 + MAX_DEATHS
    others = [one for one in sequences if one.request_id != "r70"]
    hall.step(others, 3)
    hall.settle()
    assert [hall.tokens_of(one) for one in others] == [[1, 2, 3]] * len(others)
    assert not hall.streams._trials.suspects


def test_a_death_without_a_reason_costs_nothing() -> None:
    hall = Hall(2)
    sequences = started(hall, 8)
    for identity in list(hall.readers):
        hall.die(identity)
        hall.step(sequences, 2)
        hall.settle()
    assert [hall.tokens_of(one) for one in sequences] == [[1, 2, 2]] * 8
    assert hall.given_up == []


def test_who_dies_of_something_else_during_a_trial_blames_nobody() -> None:
    """The worker was not sent the trial: the message before it is not confirmed yet."""
    hall = Hall()
    sequences = started(hall, 2)
    for _ in range(5 * MAX_DEATHS):
        [identity] = hall.readers
        hall.die(identity)
        list(hall.streams.take_messages())
    hall.die(next(iter(hall.readers)))
    hall.settle()
    assert [hall.tokens_of(one) for one in sequences] == [[1], [1]]


def test_a_goodbye_ends_a_trial() -> None:
    hall = Hall()
    sequences = started(hall, 3)
    hall.die(b"d1")
    [(identity, _)] = hall.streams.take_messages()
    hall.streams.confirmed(identity)
    hall.streams.lost(identity)
    del hall.readers[identity]
    hall.start()
    hall.settle()
    assert [hall.tokens_of(one) for one in sequences] == [[1]] * 3


def test_what_is_closed_while_it_waits_or_is_tried_is_told_to_nobody() -> None:
    hall = Hall()
    waiting, tried, other = started(hall, 3)
    hall.die(b"d1")
    hall.streams.close(waiting)
    [(identity, delta)] = hall.streams.take_messages()
    hall.readers[identity].read(delta)
    hall.streams.confirmed(identity)
    hall.streams.close(tried)
    hall.settle()
    assert hall.tokens_of(other) == [1]
    assert sum(map(len, (one.tokens for one in hall.readers.values()))) == 1
    assert not hall.streams._trials.suspects


@given(
    number=st.integers(1, 3),
    is_poison=st.lists(st.sampled_from([False, False, False, True]), min_size=1, max_size=20),
    random=st.randoms(use_true_random=False),
)
@settings(max_examples=150)
def test_all_poison_is_found_and_nothing_else(
    number: int, is_poison: list[bool], random: Random
) -> None:
    hall = Hall(number)
    sequences = started(hall, len(is_poison))
    poison = {f"r{index}" for index, bad in enumerate(is_poison) if bad}
    hall.poison = poison
    alive = list(sequences)
    for token_id in range(2, 8):
        if random.random() < 0.5:
            hall.die(random.choice(list(hall.readers)))
        alive = [one for one in alive if one.request_id not in hall.given_up]
        hall.step(alive, token_id)
        if random.random() < 0.7:
            hall.settle()
    hall.settle()
    assert set(hall.given_up) <= poison
    for sequence in sequences:
        if sequence.request_id not in hall.given_up:
            assert hall.tokens_of(sequence) == sequence.output_token_ids
