"""Offsets in the text of the tokens that have logprobs."""

import pytest

from penstock.services.detokenizer.text_stream import TextStream
from tests.services.test_detokenizer import END, TABLE, ids, opened, packed


@pytest.mark.parametrize("size", [1, 3, 100])
def test_logprobs_have_the_offsets_of_their_text(size: int) -> None:
    """Special tokens and parts of characters add none; text that is held back is counted."""
    tokens = [*ids("a🙂b"), END, *ids("xc")]
    stream = TextStream(opened(logprobs=[], stop=["xy"]), TABLE)
    offsets = []
    for start in range(0, len(tokens), size):
        some = tokens[start : start + size]
        logprobs = stream.feed(some, [packed(token) for token in some]).logprobs or []
        offsets += [one and one.text_offset for one in logprobs]
    assert offsets == [0, 1, 1, 1, 1, 2, 3, 3, 4]
