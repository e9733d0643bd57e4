"""Grammars whose masks take too much CPU time fail; other rows continue."""

from collections.abc import Iterator

import numpy as np
import pytest

from penstock.protocol.config import Config
from penstock.protocol.messages.structured import StructuredOutputs
from penstock.services.worker import grammars as mask_time
from penstock.services.worker.grammars import Grammars

AMBIGUOUS = 'start: e\ne: e e | e e e | "a" | "a" "a" | ""'
IM_END = 258
MAX_TOKENS = 600


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(Config().model_folder)
    yield made
    made.clear()


def test_an_ambiguous_grammar_fails_alone(grammars: Grammars) -> None:
    """Long before llguidance's limit of items in a row, which it reaches after 59 s."""
    grammars.add(0, StructuredOutputs(grammar=AMBIGUOUS), [], [IM_END])
    grammars.add(1, StructuredOutputs(regex="a*"), [], [IM_END])
    masks = np.zeros((2, grammars.num_words), np.int32)
    for _ in range(MAX_TOKENS):
        if failed := grammars.fill(masks, {0: 0, 1: 1}):
            break
        assert masks[0, 3] & 2
        grammars.accept({0: ord("a"), 1: ord("a")})
    assert failed.keys() == {0}
    assert "whose masks take more than" in failed[0]
    assert (masks[0] == -1).all()
    assert not grammars.fill(masks, {1: 1})
    assert masks[1].tolist() == [0, 0, 0, 2, 0, 0, 0, 0, 4]


def test_a_slow_row_fails_where_its_text_may_not_end(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_time, "SLOW_SECONDS", -1.0)
    monkeypatch.setattr(mask_time, "MAX_MASK_SECONDS", -1.0)
    grammars.add(0, StructuredOutputs(regex="ab"), [], [IM_END])
    masks = np.zeros((1, grammars.num_words), np.int32)
    assert not grammars.fill(masks, {0: 0})
    assert "whose masks take more than" in grammars.fill(masks, {0: 0})[0]


def test_timed_masks_are_the_same(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a slow step are timed, until a step of theirs is fast."""
    for slot, regex in enumerate(("a+b", "c")):
        grammars.add(slot, StructuredOutputs(regex=regex), [], [IM_END])
    rows = [grammars._rows[slot].state.timed for slot in (0, 1)]
    plain, timed = (np.zeros((2, grammars.num_words), np.int32) for _ in range(2))
    monkeypatch.setattr(mask_time, "SLOW_SECONDS", -1.0)
    assert not grammars.fill(plain, {0: 0, 1: 1})
    assert [row.is_timed for row in rows] == [True, True]
    assert not grammars.fill(timed, {0: 0, 1: 1})
    assert all(row.seconds > 0 for row in rows)
    monkeypatch.setattr(mask_time, "SLOW_SECONDS", 1e9)
    assert not grammars.fill(timed, {0: 0, 1: 1})
    assert [row.is_timed for row in rows] == [False, False]
    assert np.array_equal(plain, timed)
