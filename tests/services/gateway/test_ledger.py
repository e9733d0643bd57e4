"""The ledger takes each token once, whatever is repeated."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.client import JSON, GenerateRequest, TextDelta
from penstock.services.gateway.ledger import Client, Entry, GapError, Ledger

TEXT = "0123456789" * 4


def entry(request_id: str = "a") -> Entry:
    return Entry(GenerateRequest(prompt="p"), request_id, Client((b"c",), JSON))


def delta(begin: int, end: int, attempt: int = 0) -> TextDelta:
    """Tokens `begin` to `end`, where each token is one character."""
    return TextDelta(
        request_id="a",
        token_offset=begin,
        char_offset=begin,
        token_ids=list(range(begin, end)),
        text=TEXT[begin:end],
        attempt=attempt,
    )


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))))
def test_repeats_are_trimmed(steps: list[tuple[int, int]]) -> None:
    """Each step goes back by some tokens and then on by others."""
    open_ = entry()
    seen: list[int] = []
    text = ""
    for back, length in [*steps, (9, len(TEXT))]:
        begin = max(0, len(seen) - back)
        new = open_.append(delta(begin, min(begin + length, len(TEXT))))
        if new is not None:
            assert (new.token_offset, new.char_offset) == (len(seen), len(text))
            seen += new.token_ids
            text += new.text
        assert open_.token_ids == seen == list(range(len(seen)))
    assert text == open_.reply("length").text == TEXT


def test_a_gap_is_an_error() -> None:
    open_ = entry()
    open_.append(delta(0, 3))
    with pytest.raises(GapError, match="token 5; 3 are known"):
        open_.append(delta(5, 6))


def test_deltas_of_an_older_attempt_are_dropped() -> None:
    ledger = Ledger()
    ledger.add(entry())
    (open_,) = ledger.begin_again()
    assert open_.append(delta(0, 3, attempt=0)) is None
    assert open_.append(delta(0, 3, attempt=1)) is not None
    assert open_.submission().output_token_ids == [0, 1, 2]
    assert open_.submission().attempt == 1
