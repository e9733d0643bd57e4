"""Streams of detokenizers that come and go, die, or fall silent."""

from random import Random
from time import monotonic
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocol.messages.packed import unpack
from penstock.protocol.messages.pipeline import Heartbeat
from penstock.protocol.poison import MAX_DEATHS
from penstock.protocol.transport.channel import MAX_MISSED_HEARTBEATS, Channel
from penstock.protocol.transport.peers import MAX_SILENT
from penstock.protocol.transport.process import Identity
from penstock.services.scheduler.in_flight_plan import PlanOutput
from penstock.services.scheduler.poison import TRIAL_BATCH, DetokenizerTrials, SequencePoison
from penstock.services.scheduler.process import SchedulerProcess
from penstock.services.scheduler.sequence import Sequence
from tests.services.scheduler.builders import make_sequence
from tests.services.scheduler.desk import Desk, Reader, packed
from tests.services.scheduler.processes import Gateway, Reports, opened, request, step

# ---- Messages to detokenizers that come and go -----------------------------------------------


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
    assert list(desk.streams.take_messages()) == []


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
    assert list(desk.streams.take_messages()) == []


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
    sequence.num_prefill_tokens, sequence.num_cached_tokens = 10, 8
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
    assert list(desk.streams.take_messages()) == []


def test_what_an_earlier_attempt_ended_is_told_at_once() -> None:
    desk = Desk("a")
    sequence = make_sequence((1, 2), (5,), stop=["x"])
    sequence.finish_reason = "length"
    desk.streams.open(sequence)
    desk.deliver()
    assert desk.readers[b"a"].finished == {sequence.stream_id: "length"}
    assert desk.readers[b"a"].opened[0].stop == ["x"]


# ---- logprobs --------------------------------------------------------------------------------


def test_logprobs_reach_their_reader_with_the_tokens() -> None:
    """Logprobs come at the place of their token; a stream that is opened brings its own."""
    desk = Desk("a")
    (silent,), (early,) = desk.open(), desk.open(logprobs=1)
    desk.step([silent, early], 5)
    late = desk.open(logprobs=0)
    desk.step([silent, late[0], early], 6)
    desk.deliver()
    desk.step([silent, *late, early], 7)
    desk.deliver()
    assert desk.readers[b"a"].logprobs == {
        early.stream_id: [packed(5), packed(6), packed(7)],
        late[0].stream_id: [packed(6), packed(7)],
    }


def test_tokens_of_one_step_have_their_own_logprobs() -> None:
    """Drafts that were right give a sequence several tokens in a step."""
    desk = Desk("a")
    (sequence,) = desk.open(logprobs=0)
    desk.step([sequence], 4)
    for token_id in 5, 6:
        sequence.add_logprobs(packed(token_id))
        sequence.token_ids.append(token_id)
    told = {0: packed(5), 1: packed(6)}
    desk.streams.put(PlanOutput([sequence, sequence], [5, 6], [], [], told, []))
    desk.deliver()
    assert desk.readers[b"a"].logprobs == {sequence.stream_id: [packed(4), packed(5), packed(6)]}


def test_reopened_stream_is_told_all_logprobs() -> None:
    desk = Desk("a")
    sequence = make_sequence((1, 2), (3, 4), logprobs=1, prompt_logprobs=0)
    desk.streams.open(sequence)
    desk.compute(sequence, 0, 2)
    desk.step([sequence], 5)
    desk.deliver()
    desk.streams.reopen(sequence)
    desk.step([sequence], 6)
    desk.deliver()
    assert desk.readers[b"a"].logprobs[sequence.stream_id] == [None, None, packed(5), packed(6)]
    assert [one.prompt_logprobs for one in desk.readers[b"a"].opened] == [[packed(2)]] * 2


def test_what_an_earlier_attempt_ended_has_no_logprobs_of_its_prompt() -> None:
    desk = Desk("a")
    sequence = make_sequence((1, 2), (5,), logprobs=1, prompt_logprobs=0)
    sequence.finish_reason = "length"
    desk.streams.open(sequence)
    desk.deliver()
    [opened] = desk.readers[b"a"].opened
    assert (opened.logprobs, opened.prompt_logprobs) == ([None], None)


def test_a_stream_is_told_how_its_text_is_made() -> None:
    desk = Desk("a")
    [sequence] = desk.open(include_stop_str_in_output=True, skip_special_tokens=False, min_tokens=3)
    desk.step([sequence], 5)
    desk.deliver()
    [opened] = desk.readers[b"a"].opened
    assert (opened.include_stop_str_in_output, opened.skip_special_tokens) == (True, False)
    assert (opened.min_tokens, opened.logprobs, opened.prompt_logprobs) == (3, None, None)


def test_a_stream_is_opened_with_the_times_of_its_request() -> None:
    desk = Desk("a", "b")
    [sequence] = desk.open()
    sequence.arrived_at, now = 1.0, monotonic()
    sequence.admit(slot=0)
    first = sequence.scheduled_at
    assert first >= now
    desk.step([sequence], 5)
    desk.deliver()
    sequence.admit(slot=1)  # after a preemption
    desk.streams.lost(b"a")
    desk.deliver()
    [opened], [again] = desk.readers[b"a"].opened, desk.readers[b"b"].opened
    assert opened.phase_seconds == (first - 1.0, sequence.first_token_at - first)
    assert again.phase_seconds == opened.phase_seconds


# ---- Streams that kill detokenizers are found, and the others have all their tokens ----------


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


def test_a_prompt_whose_logprobs_kill_is_given_up() -> None:
    """Only this stream ends, before its first token. Others get later chunks after their trial."""
    hall = Hall()
    bad, good, silent = hall.open(3, prompt_logprobs=0)
    hall.poison.add(bad.request_id)
    for sequence in bad, good:
        hall.compute(sequence, 0, 1)
    hall.settle()
    assert hall.given_up == [bad.request_id]
    hall.compute(silent, 0, 1)
    for sequence in good, silent:
        hall.compute(sequence, 1, 3, 5)
    hall.settle()
    assert [hall.tokens_of(sequence) for sequence in (good, silent)] == [[5], [5]]
    pieces = [piece for reader in hall.readers.values() for piece in reader.pieces]
    assert sorted(pieces) == [(0, [2], []), (0, [2, 3], [5]), (1, [3], [5])]


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


def test_a_request_of_a_trial_ends_after_its_detokenizer_was_silent() -> None:
    """The detokenizer returns under the same identity, without the requests of the trial."""
    hall = Hall()
    sequences = started(hall, 2)
    hall.die(b"d1")
    [(identity, _)] = hall.streams.take_messages()
    hall.streams.confirmed(identity)
    hall.streams.lost(identity)
    assert hall.streams.alive(identity, "d2")
    hall.streams.close(sequences[0])
    hall.settle()
    assert hall.tokens_of(sequences[1]) == [1]


def test_a_suspect_that_waits_again_when_its_trial_passes_is_tried() -> None:
    trials = DetokenizerTrials()
    [sequence] = Hall().open(1)
    trials.add([sequence])
    assert trials.next_batch() == [sequence]
    trials.add([sequence])
    trials.passed()
    assert trials.next_batch() == [sequence]


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


# ---- A silent detokenizer has not died: the registration of its successor shows a death ------


def test_a_stopped_detokenizer_costs_no_request(
    process: SchedulerProcess, gateway: Gateway, detokenizer: Channel[Any]
) -> None:
    """Stopped and continued with the same stream, again and again."""
    reports = Reports()
    process.poison = SequencePoison(reports)  # type: ignore[arg-type]
    process.accept(request(1, "r"))
    step(process)
    assert [one.request_id for one in opened(process)] == ["r"]
    for _ in range(3 * MAX_DEATHS):
        for _ in range(MAX_MISSED_HEARTBEATS + 1):
            process.on_heartbeat()
        assert not len(process.streams.detokenizers)
        detokenizer.send(Heartbeat("detokenizer.1"))
        assert process.detokenizers.socket.poll(60_000)
        process.schedule = lambda: None  # type: ignore[method-assign]
        process.on_detokenizers()
        del process.schedule
        assert [one.request_id for one in opened(process)] == ["r"]
        process.streams.confirmed(b"d")
    assert gateway.failures(process) == []
    assert reports.died_with == []
    assert set(process.requests) == {"r"}


class Silence(Hall):
    """Readers of a name that hang, without a message, at the streams of `poison`."""

    def start(self) -> None:
        self.num_readers += 1
        identity = self.identity
        self.streams.alive(identity, "d")
        self.readers[identity] = Reader()
        for dead in self.streams.detokenizers.predecessors(identity):
            self.blame(dead)

    @property
    def identity(self) -> bytes:
        return Identity("d", 1, self.num_readers).encode()

    def blame(self, dead: bytes) -> None:
        for sequence in self.streams.lost(dead, has_died=True)[1]:
            self.given_up.append(sequence.request_id)
            self.streams.close(sequence)

    def fall_silent(self) -> None:
        for _ in range(MAX_MISSED_HEARTBEATS + 1):
            self.streams.lose_silent()
        assert not len(self.streams.detokenizers)

    def die(self, identity: bytes) -> None:
        """Let a reader hang, which is killed for it."""
        self.num_deaths += 1
        del self.readers[identity]
        self.fall_silent()
        self.start()


@pytest.mark.parametrize("number", [1, 3, 80])
def test_poison_that_hangs_detokenizers_is_given_up(number: int) -> None:
    hall = Silence()
    sequences = started(hall, number)
    hall.poison = {"r0"}
    hall.die(hall.identity)
    hall.step(sequences, 2)
    hall.settle()
    assert hall.given_up == ["r0"]
    hall.step(sequences[1:], 3)
    hall.settle()
    assert [hall.tokens_of(one) for one in sequences[1:]] == [[1, 2, 3]] * (number - 1)
    assert not hall.streams._trials.suspects
    assert not hall.streams.detokenizers.remembered


def test_streams_are_tried_where_they_are_open_since() -> None:
    """Another detokenizer has them; none is there twice, and a closed one is not tried."""
    hall = Silence()
    sequences = started(hall, 4)
    first = hall.identity
    hall.fall_silent()
    hall.come("other")
    hall.step(sequences, 2)
    hall.settle()
    hall.streams.close(closed := sequences.pop())
    assert closed.stream_id
    del hall.readers[first]
    hall.start()
    hall.step(sequences, 3)
    hall.settle()
    assert [hall.tokens_of(one) for one in sequences] == [[1, 2, 3]] * 3
    assert sum(hall.loads) == 3
    assert hall.given_up == []


def test_few_detokenizers_without_a_successor_are_remembered() -> None:
    hall = Hall(0)
    for number in range(2 * MAX_SILENT):
        hall.come(f"d{number}")
        for _ in range(MAX_MISSED_HEARTBEATS + 1):
            hall.streams.lose_silent()
    assert len(hall.streams.detokenizers.remembered) == MAX_SILENT
