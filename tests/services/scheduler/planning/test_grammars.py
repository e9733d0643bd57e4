"""A sequence is planned when its grammar is compiled; nothing else waits for it."""

from typing import Any

import pytest

from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.plan import BatchPlan, SampledTokens
from penstock.protocol.messages.structured import GRAMMAR_FAILED, StructuredOutputs
from penstock.protocol.messages.worker import CompileGrammars, GrammarCompiled
from penstock.services.scheduler import grammar_index
from penstock.services.scheduler.sequence import Sequence, Status
from tests.services.scheduler.builders import make_sequence
from tests.services.scheduler.reference import LOOP
from tests.services.scheduler.simulation import Simulation

A, B = StructuredOutputs(regex="a"), StructuredOutputs(regex="b")


@pytest.fixture
def sim() -> Simulation:
    made = Simulation(num_blocks=100, max_num_seqs=8, keeps_memory=True)
    made.holds_grammars = True
    return made


def asked(sim: Simulation) -> CompileGrammars:
    message = sim.scheduler.next_grammars()
    assert message
    sim.compiling += [number for number, _ in message.added]
    return message


def compiled(sim: Simulation, number: int, error: str = "") -> list[Sequence]:
    sim.compiling.remove(number)
    return sim.scheduler.on_compiled(GrammarCompiled(sim.scheduler.epoch, number, 1, error))


def planned(sim: Simulation) -> set[Sequence]:
    """Return the sequences of the next plan, whose tokens then come."""
    sim.send()
    found = sim.scheduler.in_flight[-1].sequences
    sim.receive()
    return found


def test_a_row_that_waits_for_its_grammar_is_in_no_plan(sim: Simulation) -> None:
    """Nor is a second one with an equal grammar, which is compiled once."""
    first, plain = sim.add(structured_outputs=A), sim.add()
    second = sim.add(structured_outputs=StructuredOutputs(regex="a"))
    assert asked(sim).added == [(1, A)]
    assert planned(sim) == {plain}
    assert sim.scheduler.num_waiting == 2
    assert compiled(sim, 1) == []
    assert planned(sim) == {first, plain, second}
    row = sim.plans[-1].added[0]
    assert row.extras
    assert row.extras.grammar == first.grammar == 1
    third = sim.add(structured_outputs=A)
    assert third in planned(sim), "it is compiled already"
    sim.run()


def test_one_text_as_different_kinds_is_different_grammars(sim: Simulation) -> None:
    kinds: list[dict[str, Any]] = [{"regex": "a"}, {"grammar": "a"}, {"choice": ["a"]}]
    for kind in kinds:
        sim.add(structured_outputs=StructuredOutputs(**kind))
    assert [spec for _, spec in asked(sim).added] == [StructuredOutputs(**kind) for kind in kinds]


def test_clients_take_turns(sim: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_index, "MAX_COMPILING", 2)
    for name in ("many", "many", "single"):
        wanted = StructuredOutputs(regex=f"{name}{len(sim.sequences)}")
        sim.add(client=name, structured_outputs=wanted)
    sent = [spec.regex for _, spec in asked(sim).added]
    assert sent == ["many0", "single2"]
    assert sim.scheduler.next_grammars() is None
    compiled(sim, 1)
    assert [spec.regex for _, spec in asked(sim).added] == ["many1"]


def test_a_request_that_ends_while_its_grammar_waits_or_is_compiled(
    sim: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_index, "MAX_COMPILING", 1)
    compiling, waiting = sim.add(structured_outputs=A), sim.add(structured_outputs=B)
    asked(sim)
    for sequence in (compiling, waiting):
        sim.finish(sequence, "abort")
    compiled(sim, 1)
    assert sim.scheduler.next_grammars() is None, "nobody wants the second one"
    assert sim.add(structured_outputs=A) in planned(sim)
    sim.run()


def test_a_grammar_that_the_worker_can_not_compile_ends_its_requests(sim: Simulation) -> None:
    sequences = [sim.add(structured_outputs=A), sim.add(structured_outputs=A)]
    asked(sim)
    assert compiled(sim, 1, "too large") == sequences
    for sequence in sequences:
        sim.finish(sequence, "abort")
    sim.add(structured_outputs=A)
    assert asked(sim) == CompileGrammars(1, [(2, A)], [1]), "it may have been another cause"
    sim.run()


def test_the_number_of_grammars_is_limited(
    sim: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that is unused for the longest time goes first; used ones stay."""
    monkeypatch.setattr(sim.scheduler.grammars, "_most", 2)
    sequences = [
        sim.add(structured_outputs=StructuredOutputs(regex=f"{number}")) for number in range(3)
    ]
    assert [number for number, _ in asked(sim).added] == [1, 2]
    compiled(sim, 1)
    compiled(sim, 2)
    assert sim.scheduler.next_grammars() is None
    for sequence in (sequences[1], sequences[0]):
        sim.finish(sequence, "abort")
    assert asked(sim) == CompileGrammars(1, [(3, StructuredOutputs(regex="2"))], [2])
    assert sim.add(structured_outputs=StructuredOutputs(regex="0")).grammar == 1
    sim.run()


def test_unused_grammars_have_limited_bytes(sim: Simulation) -> None:
    for number, spec in enumerate((A, B), 1):
        sequence = sim.add(structured_outputs=spec)
        asked(sim)
        sim.compiling.clear()
        size = grammar_index.MAX_UNUSED_BYTES // 2 + 1
        sim.scheduler.on_compiled(GrammarCompiled(1, number, size))
        sim.finish(sequence, "abort")
    assert sim.scheduler.next_grammars() == CompileGrammars(1, [], [1])


@pytest.mark.parametrize("keeps_memory", [True, False])
def test_the_next_worker_compiles_again_while_others_continue(
    sim: Simulation, keeps_memory: bool
) -> None:
    running = sim.add(structured_outputs=A, seed=LOOP, max_tokens=20)
    plain = sim.add(seed=LOOP, max_tokens=20)
    asked(sim)
    compiled(sim, 1)
    assert planned(sim) == {running, plain}
    waiting = sim.add(structured_outputs=B)
    asked(sim)
    sim.restart(keeps_memory=keeps_memory)
    assert [spec for _, spec in asked(sim).added] == [A, B]
    assert planned(sim) == {plain}
    assert planned(sim) == {plain}
    compiled(sim, 3)
    assert planned(sim) == {plain, running}
    compiled(sim, 4)
    assert planned(sim) == {plain, running, waiting}
    sim.run()


@pytest.mark.parametrize("num_equal", [1, 2])
def test_a_grammar_that_kills_the_workers_is_found(sim: Simulation, num_equal: int) -> None:
    """The grammar is compiled alone, for one request, when nothing runs; others then continue."""
    poison = [sim.add(structured_outputs=A) for _ in range(num_equal)]
    plain = sim.add(ignore_eos=True, max_tokens=20)
    for _ in range(2):
        asked(sim)
        sim.send()
        sim.restart(keeps_memory=True)
    assert all(sequence.is_suspect for sequence in [*poison, plain])
    while any(sequence.finish_reason is None for sequence in poison):
        message = sim.scheduler.next_grammars()
        if message:
            sim.compiling += [number for number, _ in message.added]
            assert not sim.scheduler.running
            sim.restart(keeps_memory=True)
        else:
            assert sim.step() is not None
    assert {sequence.finish_reason for sequence in poison} == {"abort"}
    sim.run()
    assert plain.finish_reason == "length"


def failing(sim: Simulation, plan: BatchPlan, *indices: int) -> list[tuple[Sequence, str]]:
    """Return what the scheduler makes of rows whose matchers failed."""
    sampled = sim.scheduler.in_flight[0].sampled
    failed = [(index, f"{GRAMMAR_FAILED}: x") for index in indices]
    tokens = SampledTokens(plan.epoch, plan.step, pack([1] * len(sampled)), failed=failed)
    return sim.scheduler.update(tokens).failed


def test_rows_that_fail_with_a_shared_grammar_are_tried_alone(sim: Simulation) -> None:
    scheduler = sim.scheduler
    first, second = (sim.add(structured_outputs=A, max_tokens=9) for _ in range(2))
    asked(sim)
    compiled(sim, 1)
    plans = [scheduler.schedule(), scheduler.schedule()]
    assert plans[0]
    assert plans[1]
    assert failing(sim, plans[0], 0) == []
    assert first.status is Status.WAITING
    assert failing(sim, plans[1], 0) == [], "a later plan in flight"
    assert asked(sim).added == [(2, A)]
    compiled(sim, 2)
    assert (first.grammar, second.grammar) == (2, 1)
    last = scheduler.schedule()
    assert last
    failures = failing(sim, last, scheduler.in_flight[0].sampled.index(first))
    assert failures[0][0] is first, "it is its own failure"
    scheduler.finish(second, "abort")
    scheduler.finish(first, "abort")
    new = make_sequence(structured_outputs=A)
    scheduler.add(new)
    assert set(asked(sim).removed) == {1, 2}
    assert new.grammar == 0, "the failed one is not used again"


def test_a_row_whose_matcher_failed_is_tried_again_without_drafts() -> None:
    """Masks of drafts also count for the matcher's limits."""
    sim = Simulation(num_blocks=100, speculative_method="ngram")
    scheduler, sequence = sim.scheduler, sim.add(structured_outputs=A, max_tokens=9)
    tries = []
    for _ in range(2):
        sim.compile()
        plan = scheduler.schedule()
        assert plan
        tries.append((sequence.proposer is not None, failing(sim, plan, 0)))
    assert tries[0] == (True, [])
    assert tries[1] == (False, [(sequence, f"{GRAMMAR_FAILED}: x")])
