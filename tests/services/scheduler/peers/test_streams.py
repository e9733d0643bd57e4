"""Messages to detokenizers that come and go."""

from time import monotonic

import pytest

from penstock.protocol.messages.packed import unpack
from tests.services.scheduler.builders import make_sequence
from tests.services.scheduler.desk import Desk, packed


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


def test_reopened_stream_is_told_all_logprobs() -> None:
    desk = Desk("a")
    sequence = make_sequence((1, 2), (3, 4), logprobs=1, prompt_logprobs=0)
    sequence.add_prompt_logprobs([packed(2)])
    desk.streams.open(sequence)
    desk.step([sequence], 5)
    desk.deliver()
    desk.streams.reopen(sequence)
    desk.step([sequence], 6)
    desk.deliver()
    assert desk.readers[b"a"].logprobs[sequence.stream_id] == [None, None, packed(5), packed(6)]
    assert [one.prompt_logprobs for one in desk.readers[b"a"].opened] == [[packed(2)]] * 2


def test_stream_waits_for_the_logprobs_of_its_prompt() -> None:
    """Also when it moves while the prompt is being computed: they are sent when it is opened."""
    desk = Desk("a", "b")
    [sequence] = desk.open(prompt_logprobs=0)
    sequence.add_prompt_logprobs([packed(2)])
    desk.streams.lost(b"a")
    desk.deliver()
    assert not desk.readers[b"b"].opened
    sequence.add_prompt_logprobs([packed(3)])
    desk.step([sequence], 5)
    desk.deliver()
    [opened] = desk.readers[b"b"].opened
    assert opened.prompt_logprobs == [packed(2), packed(3)]


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
