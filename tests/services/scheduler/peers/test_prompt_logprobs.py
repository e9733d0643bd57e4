"""Prompt logprobs reach the detokenizer in pieces, as the chunks of the prompt are computed."""

import pytest

from tests.services.scheduler.builders import make_sequence
from tests.services.scheduler.desk import Desk, packed
from tests.services.scheduler.peers.test_streams import Silence


def test_each_chunk_of_a_prompt_is_told_alone() -> None:
    """No message has more of a prompt's logprobs than a chunk; the last brings the first token."""
    desk = Desk("a")
    sequence = make_sequence((1, 2, 3, 4, 5), prompt_logprobs=0, logprobs=0)
    desk.streams.open(sequence)
    sequence.admit(slot=0)
    desk.deliver()
    for begin, token_id in (0, None), (2, None), (4, 6):
        desk.compute(sequence, begin, min(begin + 2, 5), token_id)
        desk.deliver()
    desk.step([sequence], 7)
    desk.deliver()
    reader = desk.readers[b"a"]
    assert reader.pieces == [(0, [2, 3], []), (2, [4, 5], []), (4, [], [6])]
    assert [opened.phase_seconds[1] > 0 for opened in reader.opened] == [False, False, True]
    assert reader.tokens == {sequence.stream_id: [6, 7]}
    assert reader.logprobs == {sequence.stream_id: [packed(6), packed(7)]}


def test_a_prompt_with_an_earlier_output_tells_it_at_its_end() -> None:
    """Else a client would get the output without the prompt's logprobs."""
    desk = Desk("a")
    sequence = make_sequence((1, 2, 3), (4, 5), prompt_logprobs=0, logprobs=0)
    desk.streams.open(sequence)
    for begin in 0, 1, 2:
        desk.compute(sequence, begin, begin + 1)
        desk.deliver()
    desk.compute(sequence, 4, 5, 6)
    desk.deliver()
    reader = desk.readers[b"a"]
    assert reader.pieces == [(0, [2], []), (1, [3], [4, 5])]
    assert reader.tokens == {sequence.stream_id: [4, 5, 6]}
    assert reader.logprobs == {sequence.stream_id: [None, None, packed(6)]}


def test_chunks_that_wait_for_a_detokenizer_are_one_message() -> None:
    desk = Desk("a")
    [sequence] = desk.open(prompt_logprobs=0)
    desk.compute(sequence, 0, 1)
    desk.compute(sequence, 1, 3, 4)
    desk.deliver()
    assert desk.readers[b"a"].pieces == [(0, [2, 3], [4])]


@pytest.mark.parametrize("delivered", [True, False])
def test_a_stream_that_moves_tells_all_known_logprobs_of_its_prompt(delivered: bool) -> None:
    desk = Desk("a", "b")
    sequence = make_sequence((1, 2, 3, 4), prompt_logprobs=0)
    desk.streams.open(sequence)
    sequence.num_prefill_tokens = 4
    desk.compute(sequence, 0, 1)
    if delivered:
        desk.deliver()
    desk.streams.lost(b"a")
    desk.deliver()
    desk.compute(sequence, 1, 2)
    desk.deliver()
    desk.come("c")
    desk.streams.lost(b"b")
    desk.compute(sequence, 2, 4, 5)
    desk.deliver()
    assert desk.readers[b"b"].pieces == [(0, [2], []), (1, [3], [])]
    assert desk.readers[b"c"].pieces[-1] == (0, [2, 3, 4], [5])


@pytest.mark.parametrize("delivered", [True, False])
def test_a_stream_that_ends_within_its_prompt_is_closed(delivered: bool) -> None:
    """The client aborts it. `Reader` raises if a stream is closed that was not opened."""
    desk = Desk("a")
    sequence = make_sequence((1, 2, 3, 4), prompt_logprobs=0)
    desk.streams.open(sequence)
    desk.compute(sequence, 0, 1)
    if delivered:
        desk.deliver()
        desk.compute(sequence, 1, 2)
    sequence.finish_reason = "abort"
    desk.streams.close(sequence)
    desk.compute(sequence, 1, 3)  # was in flight
    desk.deliver()
    assert (desk.loads, desk.readers[b"a"].finished) == ([0], {})


def test_what_is_computed_again_is_not_told_again() -> None:
    """After a preemption, in other chunks."""
    desk = Desk("a")
    [sequence] = desk.open(prompt_logprobs=0)
    for begin, end in (0, 1), (0, 1), (1, 2):
        desk.compute(sequence, begin, end)
        desk.deliver()
    assert not sequence.needs_prompt_logprobs
    assert sequence.prompt_logprobs == [packed(2), packed(3)]
    assert desk.readers[b"a"].pieces == [(0, [2], []), (1, [3], [])]
    again = make_sequence((1, 2, 3, 4), prompt_logprobs=0)
    desk.streams.open(again)
    desk.compute(again, 0, 1)
    desk.compute(again, 0, 3)
    assert again.prompt_logprobs == [packed(2), packed(3), packed(4)]


def test_chunks_after_a_trial_are_told() -> None:
    """A detokenizer hangs within a prompt, so its streams are tried alone at the next."""
    hall = Silence()
    sequence = make_sequence((1, 2, 3, 4, 5), prompt_logprobs=0)
    hall.streams.open(sequence)
    sequence.num_prefill_tokens = 5
    hall.compute(sequence, 0, 2)
    hall.settle()
    hall.die(hall.identity)
    hall.settle()
    for begin, end, token_id in (2, 4, None), (4, 5, 6):
        hall.compute(sequence, begin, end, token_id)
        hall.settle()
    (reader,) = hall.readers.values()
    assert reader.pieces == [(0, [2, 3], []), (2, [4, 5], []), (4, [], [6])]
