"""Guesses: where they come from, what they take, and what a wrong one costs."""

from typing import Any

import pytest

from penstock.services.scheduler import draft_scheduler
from penstock.services.scheduler.ngram_lookup import LONG, MAX_REQUIRED, SHORT, NgramLookup
from penstock.services.scheduler.proposer import KNOWN
from tests.services.scheduler.builders import long_prompt
from tests.services.scheduler.packed_plans import split
from tests.services.scheduler.reference import LOOP
from tests.services.scheduler.simulation import Simulation

Draft = tuple[int, tuple[int, list[int]]]


def speculating(**options: Any) -> Simulation:
    defaults = {"speculative_method": "ngram", "num_speculative_tokens": 3, "max_num_seqs": 16}
    return Simulation(num_blocks=40, max_model_len=100, **defaults | options)


def drafts(sim: Simulation) -> list[list[Draft]]:
    """Return the drafts of each plan, as (slot, (position, tokens))."""
    return [split(plan.drafts) for plan in sim.plans]


def finds(lookup: NgramLookup) -> bool:
    """Read all tokens, and look up their end."""
    lookup.read(len(lookup.token_ids))
    return lookup.look_up()


def test_guesses_run_ahead_of_the_tokens() -> None:
    sim = speculating(num_plans_in_flight=3)
    sim.add([1, 2, 3] * 4, seed=LOOP, max_tokens=30)
    sim.run()
    assert drafts(sim)[:4] == [
        [],
        [(0, (12, [KNOWN, 2, 3, 1]))],
        [(0, (16, [2, 3, 1, 2]))],
        [(0, (20, [3, 1, 2, 3]))],
    ]
    # 1 by the prefill and 28 in sevens; the last token is not a guess, but follows from one
    behind = [draft for plan in drafts(sim)[7:] for draft in plan]
    assert behind == [(0, (36, [1, 2, 3, 1])), (0, (40, [2]))]
    counted = sim.scheduler.draft_scheduler
    assert counted.num_draft_tokens == counted.num_accepted_tokens == 3 + 6 * 4
    assert not sim.num_wasted


def test_a_preempted_sequence_waits_for_its_guesses_in_flight() -> None:
    """The third plan has a row of it only for guesses."""
    sim = speculating(num_plans_in_flight=3)
    sequence = sim.add([1, 2, 3] * 4, seed=LOOP, max_tokens=30)
    for _ in range(3):
        assert sim.send()
    assert drafts(sim)[2] == [(0, (16, [2, 3, 1, 2]))]
    sim.preempt(sequence)
    for number in range(3):
        assert sequence not in sim.scheduler.running, number
        sim.receive()
        sim.send()
    assert sequence in sim.scheduler.running
    sim.run()


def test_after_a_wrong_guess_it_goes_on_from_the_last_token() -> None:
    """Steps in flight after the guess are void; decoding then continues as usual."""
    sim = speculating(num_plans_in_flight=2)
    sequence = sim.add([1, 2, 3] * 4, seed=4, ignore_eos=True, max_tokens=10)
    sim.run()
    [(_, (begin, first))], [(_, (behind, _))], [(_, (again, second))] = drafts(sim)[1:4]
    right = sequence.token_ids[begin + 1 : begin + 4]
    num_right = next(n for n in range(4) if first[1:][: n + 1] != right[: n + 1])
    assert (begin, behind, again) == (12, 16, 13 + num_right)
    assert second == [sequence.token_ids[again]]
    assert not any(drafts(sim)[4:])


def test_what_takes_no_guesses() -> None:
    """A full batch, a request that asks for none; there is no switch for all."""
    none = speculating()
    none.add([1, 2, 3] * 4, seed=LOOP, max_tokens=9, speculative=False)
    assert not any(drafts(none.run()))
    full, off = speculating(max_num_seqs=2), speculating(speculative_method="none")
    for sim in (full, off):
        for _ in range(2):
            sim.add([1, 2, 3] * 4, seed=LOOP, max_tokens=9)
        assert not any(drafts(sim.run()))


def test_guesses_take_what_is_left() -> None:
    sim = speculating(max_num_seqs=6, num_plans_in_flight=1)
    for _ in range(2):
        sim.add([1, 2, 3] * 4, seed=LOOP, max_tokens=9)
    sim.add(long_prompt(12, 5), seed=LOOP, max_tokens=9)
    sim.step()
    sim.step()
    assert drafts(sim)[1] == [(0, (12, [KNOWN, 2, 3, 1]))]  # 3 rows, and 3 guesses
    sim.run()


@pytest.mark.parametrize("num_blocks", [4, 5])
def test_guesses_preempt_nobody(num_blocks: int) -> None:
    """Two rows with two blocks each; only with a fifth the first one's guesses find room."""
    sim = Simulation(
        num_blocks=num_blocks, speculative_method="ngram", max_num_seqs=16, num_plans_in_flight=1
    )
    sim.add([1, 2, 3, 1, 2, 3], seed=LOOP, max_tokens=5)
    sim.add([2, 2, 3, 1, 2, 3], seed=LOOP, max_tokens=2)
    sim.step()
    sim.step()
    found = [tokens for _, (_, tokens) in drafts(sim)[1]]
    assert [len(tokens) for tokens in found] == [2 if num_blocks == 4 else 4]
    assert not sim.scheduler.num_preemptions
    sim.run()


def test_the_newest_and_longest_place_is_found() -> None:
    text = long_prompt(LONG, 10)
    token_ids = [*text, 1, *text[-SHORT:], 2, *text]
    lookup = NgramLookup(token_ids)
    assert finds(lookup)
    begin = len(token_ids)
    assert lookup.drafts(begin, begin + 3) == [1, *text[-SHORT:-1]]
    token_ids = [*text, 1, 5, *text[-SHORT:], 2, 5, *text[-SHORT:]]
    lookup = NgramLookup(token_ids)
    assert finds(lookup)
    begin = len(token_ids)
    assert lookup.drafts(begin, begin + 2) == [2, 5]
    assert not finds(NgramLookup([*text, *text[-SHORT + 1 :]]))


def test_long_prompts_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """All sequences of a plan share the tokens that it reads."""
    monkeypatch.setattr(draft_scheduler, "TOKENS_READ_PER_PLAN", 10)
    read, numbers = NgramLookup.read, [0]

    def counted(lookup: NgramLookup, most: int) -> int:
        number = read(lookup, most)
        numbers[-1] += number
        return number

    monkeypatch.setattr(NgramLookup, "read", counted)
    sim = speculating(max_num_batched_tokens=100, num_plans_in_flight=1)
    for first in (10, 60):
        sim.add([1, 2, 3, *long_prompt(38, first), 1, 2, 3], seed=LOOP, max_tokens=12)
    while sim.step():
        numbers.append(0)
    assert numbers[:8] == [10] * 8
    assert max(numbers) == 10
    lengths = [len(sequence.token_ids) for sequence in sim.sequences]
    assert sum(numbers) > sum(lengths) - 2 * (SHORT + 10)


def test_as_many_tokens_are_read_as_it_says() -> None:
    lookup = NgramLookup([1, 2, 3] * 4)
    assert [lookup.read(5) for _ in range(3)] == [5, 4, 0]
    assert NgramLookup([1]).read(5) == 0


def test_wrong_guesses_make_it_wary() -> None:
    """A match must be twice as long then, and one shorter after each guess that is right."""
    text = long_prompt(MAX_REQUIRED + 1)
    lookup = NgramLookup([])

    def set_tokens(*token_ids: int) -> None:
        lookup.token_ids[:] = token_ids

    assert lookup.accept_row()  # the prefill
    for required in (SHORT, 2 * SHORT, 4 * SHORT, 8 * SHORT, MAX_REQUIRED):
        set_tokens(*text, *text[: required - 1])
        assert not finds(lookup)
        set_tokens(*text, *text[:required])
        assert lookup.check() is None
        assert finds(lookup)
        lookup.send([KNOWN, 999, 998])
        assert lookup.accept_row()
        lookup.token_ids.append(1)
        assert lookup.check() is False
        assert lookup.is_paused
        assert not lookup.accept_row()
        assert not lookup.accept_row()
    lookup.send([KNOWN, text[required]])
    assert lookup.accept_row()
    set_tokens(*text, *text[: required + 1])
    assert lookup.check()
    assert lookup._required == MAX_REQUIRED - 1
    lookup = NgramLookup(text)
    lookup.accept_row()
    lookup.send([KNOWN, 1])
    lookup.accept_row()
    lookup.token_ids.append(1)
    assert lookup.check()
    assert lookup._required == SHORT, "and never shorter"
