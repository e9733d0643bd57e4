"""Which detokenizer is told what, with detokenizers that come and go."""

import pytest

from penstock.protocol.messages import StreamOpened, TokenDelta
from penstock.protocol.plan import unpack
from penstock.services.scheduler.sequence import Sequence
from penstock.services.scheduler.step import StepOutput
from penstock.services.scheduler.streams import Streams
from tests.services.scheduler.builders import make_sequence


class Reader:
    """What a detokenizer knows."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.opened: list[StreamOpened] = []
        self.finished: dict[int, str] = {}

    def read(self, delta: TokenDelta) -> None:
        for stream_id in delta.closed:
            del self.tokens[stream_id]
        for opened in delta.opened:
            self.opened.append(opened)
            self.tokens[opened.stream_id] = list(unpack(opened.output_token_ids))
            if opened.finish_reason:
                self.finished[opened.stream_id] = opened.finish_reason
        stream_ids, token_ids = unpack(delta.stream_ids), unpack(delta.token_ids)
        for stream_id, token_id in zip(stream_ids, token_ids, strict=True):
            if stream_id in self.tokens:  # else it was closed in this very message
                self.tokens[stream_id].append(token_id)
        self.finished |= dict(delta.finished)


class Desk:
    """`Streams` and its readers; messages arrive when `deliver` is called."""

    def __init__(self, *readers: str) -> None:
        self.streams = Streams(epoch=7)
        self.readers: dict[bytes, Reader] = {}
        for name in readers:
            self.come(name)

    def come(self, name: str) -> Reader:
        self.streams.alive(name.encode(), name)
        return self.readers.setdefault(name.encode(), Reader())

    def open(self, num_sequences: int = 1) -> list[Sequence]:
        """New requests, which the scheduler then admits."""
        sequences = [make_sequence() for _ in range(num_sequences)]
        for sequence in sequences:
            self.streams.open(sequence)
            sequence.num_given_tokens = sequence.num_prompt_tokens
        return sequences

    def step(self, sequences: list[Sequence], token_id: int) -> None:
        """Each of them gets a token."""
        for sequence in sequences:
            sequence.token_ids.append(token_id)
        ended = [sequence for sequence in sequences if sequence.finish_reason]
        self.streams.put(StepOutput(sequences, [token_id] * len(sequences), ended))

    def deliver(self) -> None:
        for identity, delta in self.streams.take_deltas():
            assert delta.epoch == 7
            self.readers[identity].read(delta)

    @property
    def loads(self) -> list[int]:
        return [len(reader.tokens) for reader in self.readers.values()]


def test_least_loaded_gets_the_next() -> None:
    desk = Desk("a", "b", "c")
    sequences = desk.open(6)
    desk.streams.close(sequences.pop(1))
    last = desk.open(1)
    desk.step(sequences + last, 5)
    desk.deliver()
    assert desk.loads == [2, 2, 2]
    assert last[0].stream_id in desk.readers[b"b"].tokens


def test_tokens_and_ends_reach_their_reader() -> None:
    desk = Desk("a", "b")
    sequences = one, two = desk.open(2)
    desk.step(sequences, 5)
    two.finish_reason = "length"
    desk.step(sequences, 6)
    desk.deliver()
    assert desk.readers[b"a"].tokens == {one.stream_id: [5, 6]}
    assert desk.readers[b"b"].tokens == {two.stream_id: [5, 6]}
    assert desk.readers[b"b"].finished == {two.stream_id: "length"}
    assert list(desk.streams.take_deltas()) == []


@pytest.mark.parametrize("delivered", [True, False])
def test_streams_of_a_lost_detokenizer_move_with_all_their_tokens(delivered: bool) -> None:
    desk = Desk("a", "b")
    sequences = desk.open(4)
    desk.step(sequences, 5)
    if delivered:
        desk.deliver()
    desk.streams.lost(b"a")
    desk.step(sequences, 6)
    desk.deliver()
    assert desk.readers[b"b"].tokens == {s.stream_id: [5, 6] for s in sequences}


def test_stream_that_has_ended_moves_with_its_finish_reason() -> None:
    desk = Desk("a", "b")
    [sequence] = desk.open()
    sequence.finish_reason = "stop"
    desk.step([sequence], 5)
    desk.streams.lost(b"a")
    desk.deliver()
    assert desk.readers[b"b"].finished == {sequence.stream_id: "stop"}


def test_new_detokenizer_takes_its_share() -> None:
    desk = Desk("a")
    sequences = desk.open(6)
    desk.step(sequences, 5)
    desk.deliver()
    desk.come("b")
    desk.step(sequences, 6)
    desk.deliver()
    assert desk.loads == [3, 3]
    desk.come("c")
    desk.deliver()
    assert desk.loads == [2, 2, 2]
    tokens = [t for reader in desk.readers.values() for t in reader.tokens.values()]
    assert tokens == [[5, 6]] * 6


def test_streams_wait_for_the_first_detokenizer() -> None:
    desk = Desk()
    kept, closed = desk.open(2)
    desk.step([kept, closed], 5)
    desk.streams.close(closed)
    desk.deliver()
    desk.come("a")
    desk.deliver()
    assert desk.readers[b"a"].tokens == {kept.stream_id: [5]}


def test_streams_wait_when_the_last_detokenizer_is_lost() -> None:
    desk = Desk("a")
    sequences = desk.open(2)
    desk.streams.lost(b"a")
    desk.step(sequences, 5)
    desk.come("b")
    desk.deliver()
    assert desk.readers[b"b"].tokens == {s.stream_id: [5] for s in sequences}


def test_closed_stream_is_forgotten() -> None:
    desk = Desk("a")
    [sequence] = desk.open()
    desk.step([sequence], 5)
    desk.deliver()
    desk.streams.close(sequence)
    desk.deliver()
    assert desk.loads == [0]
    desk.step([], 5)
    assert list(desk.streams.take_deltas()) == []


def test_stream_that_comes_back_in_the_same_message_is_open() -> None:
    """A detokenizer that starts and stops at once takes nothing with it."""
    desk = Desk("a")
    sequences = desk.open(2)
    desk.step(sequences, 5)
    desk.deliver()
    desk.come("b")
    desk.streams.lost(b"b")
    desk.step(sequences, 6)
    desk.deliver()
    assert desk.readers[b"a"].tokens == {s.stream_id: [5, 6] for s in sequences}


@pytest.mark.parametrize("delivered", [True, False])
def test_reopened_stream_is_told_from_its_start(delivered: bool) -> None:
    """Under another number and for another attempt; nothing is left of the old one."""
    desk = Desk("a")
    [sequence] = desk.open()
    desk.step([sequence], 5)
    if delivered:
        desk.deliver()
    desk.step([sequence], 6)
    sequence.attempt = 8
    desk.streams.reopen(sequence)
    desk.step([sequence], 7)
    desk.deliver()
    reader = desk.readers[b"a"]
    assert reader.tokens == {sequence.stream_id: [5, 6, 7]}
    assert [opened.attempt for opened in reader.opened] == [0] * delivered + [8]


def test_stream_opened_and_closed_in_one_message_is_never_heard_of() -> None:
    desk = Desk("a")
    [sequence] = desk.open()
    desk.step([sequence], 5)
    desk.streams.close(sequence)
    desk.deliver()
    assert desk.loads == [0]


def test_stream_is_opened_when_its_cached_tokens_are_known() -> None:
    desk = Desk("a")
    sequence = make_sequence(range(10))
    desk.streams.open(sequence)
    desk.deliver()
    assert desk.readers[b"a"].opened == []
    sequence.num_given_tokens, sequence.num_cached_tokens = 10, 8
    desk.step([sequence], 5)
    desk.deliver()
    [opened] = desk.readers[b"a"].opened
    assert (opened.prompt_tokens, opened.cached_tokens) == (10, 8)
    assert (list(unpack(opened.prompt_tail)), opened.attempt) == ([6, 7, 8, 9], 0)
    assert desk.readers[b"a"].tokens == {sequence.stream_id: [5]}


def test_stream_closed_while_it_waits_is_never_heard_of() -> None:
    desk = Desk("a")
    sequence = make_sequence()
    desk.streams.open(sequence)
    desk.streams.close(sequence)
    assert list(desk.streams.take_deltas()) == []


def test_what_an_earlier_attempt_ended_is_told_at_once() -> None:
    desk = Desk("a")
    sequence = make_sequence((1, 2), (5,), stop=["x"])
    sequence.finish_reason = "length"
    desk.streams.open(sequence)
    desk.deliver()
    assert desk.readers[b"a"].finished == {sequence.stream_id: "length"}
    assert desk.readers[b"a"].opened[0].stop == ["x"]
