"""Plans: depth, fairness, the waiting queue, and pooling."""

import statistics

import msgspec
import pytest

from penstock.protocol.config import Config
from penstock.protocol.messages.packed import pack, unpack
from penstock.protocol.messages.plan import RowExtras, SampledTokens
from penstock.protocol.messages.sampling import Pooling
from penstock.services.scheduler.blocks.block_manager import BlockManager
from penstock.services.scheduler.blocks.block_pool import BlockPool
from penstock.services.scheduler.in_flight_plan import PlanDepth, row_of
from penstock.services.scheduler.process import SchedulerProcess
from penstock.services.scheduler.scheduler import Scheduler
from penstock.services.scheduler.sequence import MAX_PREEMPTIONS, CannotFitError, Sequence, Status
from tests.services.scheduler.builders import long_prompt, make_sequence, seed_for_eos_after
from tests.services.scheduler.desk import Desk
from tests.services.scheduler.packed_plans import blocks, pairs
from tests.services.scheduler.processes import request
from tests.services.scheduler.reference import pooled_of
from tests.services.scheduler.simulation import Simulation

# ---- The policy: who runs, who waits, who is preempted, and what goes over the wire ----------


def test_decode_goes_on_beside_a_long_prefill() -> None:
    sim = Simulation(max_num_batched_tokens=6, num_plans_in_flight=1)
    short = sim.add(max_tokens=9, ignore_eos=True)
    sim.step()
    sim.add(long_prompt(14), max_tokens=1)
    outputs = [sim.step() for _ in range(3)]
    assert [pairs(plan.chunks)[0][1] for plan in sim.plans[1:]] == [5, 5, 4]
    assert all(output and short in output.sequences for output in outputs)
    sim.run()


@pytest.mark.parametrize(("num_watermark_blocks", "admitted"), [(0, True), (1, False)])
def test_watermark_is_left_to_those_who_run(num_watermark_blocks: int, admitted: bool) -> None:
    sim = Simulation(num_blocks=4, num_watermark_blocks=num_watermark_blocks)
    sim.add(long_prompt(7), max_tokens=4, ignore_eos=True)
    sim.send()
    sequence = sim.add(long_prompt(5, first=40), max_tokens=1)
    sim.send()
    assert (sequence.num_prefill_tokens > 0) == admitted
    sim.run()


def test_a_sequence_alone_may_have_the_whole_pool() -> None:
    sim = Simulation(num_blocks=4, num_watermark_blocks=2)
    sim.add(long_prompt(15))
    sim.run()


def test_steady_decode_plan_is_small_whatever_the_batch() -> None:
    sim = Simulation(num_blocks=512, max_num_seqs=256, max_num_batched_tokens=512)
    for _ in range(256):
        sim.add((1,), max_tokens=8, ignore_eos=True)
    sim.send()
    sim.send()
    assert len(sim.plans[0].added) == 256
    assert len(msgspec.msgpack.encode(sim.plans[1])) < 100
    sim.run()


def test_no_prefix_cache() -> None:
    sim = Simulation(enable_prefix_caching=False)
    for _ in range(2):
        sim.add(long_prompt(9), max_tokens=2)
        sim.run()
    assert [s.num_cached_tokens for s in sim.sequences] == [0, 0]
    assert not sim.pool._cached


# ---- preemption ------------------------------------------------------------------------------


def full_pool(num_plans: int = 2) -> tuple[Simulation, Sequence, Sequence]:
    """Two sequences that have all blocks; the first one needs another one next."""
    sim = Simulation(num_blocks=4, num_plans_in_flight=num_plans)
    old = sim.add(long_prompt(8), max_tokens=6, ignore_eos=True)
    new = sim.add(long_prompt(5, first=40), max_tokens=6, ignore_eos=True)
    sim.send()
    return sim, old, new


def test_the_newest_is_preempted_when_blocks_run_out() -> None:
    sim, old, new = full_pool()
    behind = sim.add((1,), max_tokens=1)
    plan = sim.send()
    assert plan and blocks(plan.appended) == [(0, old.block_table[2])]
    assert list(unpack(plan.removed)) == [1]
    assert list(sim.scheduler.waiting) == [new, behind]
    sim.run()
    assert (old.num_preemptions, new.num_preemptions) == (0, sim.scheduler.num_preemptions)


def test_preempted_is_admitted_again_when_none_of_its_steps_is_in_flight() -> None:
    sim = Simulation(num_plans_in_flight=3)
    sequence = sim.add(long_prompt(5), max_tokens=6, ignore_eos=True)
    sim.send()
    sim.send()
    sim.preempt(sequence)
    sim.send()
    sim.receive()
    sim.send()
    assert sequence.status is Status.WAITING
    sim.receive()
    plan = sim.send()
    assert plan and list(unpack(plan.added[0].token_ids)) == sequence.token_ids[4:7]
    sim.run()


def test_preempted_finds_its_own_blocks_again() -> None:
    sim = Simulation(num_plans_in_flight=1)
    sequence = sim.add(long_prompt(9), max_tokens=8, ignore_eos=True)
    for _ in range(4):
        sim.step()
    sim.preempt(sequence)
    sim.step()
    assert sim.plans[-1].added[0].num_computed_tokens == 12
    assert sequence.num_cached_tokens == 0  # as it was when the request came
    sim.run()


def test_preempted_by_itself_waits_for_those_that_drain() -> None:
    sim = Simulation(num_blocks=3)
    sim.add(long_prompt(7), max_tokens=1)
    alone = sim.add(long_prompt(4, first=40), max_tokens=6, ignore_eos=True)
    sim.send()
    sim.send()
    assert (alone.status, alone.num_preemptions) == (Status.WAITING, 1)
    sim.run()


# ---- lost workers ----------------------------------------------------------------------------


def test_restart_puts_all_back_in_order_and_keeps_their_tokens() -> None:
    sim = Simulation()
    for max_tokens in (1, 2, 9, 9):
        sim.add(long_prompt(5), max_tokens=max_tokens, ignore_eos=True)
    sim.send()
    sim.send()
    sim.add(long_prompt(5), max_tokens=1)
    statuses = [sequence.status.name for sequence in sim.sequences]
    assert statuses == ["DRAINING", "DRAINING", "RUNNING", "RUNNING", "WAITING"]
    sim.restart()
    assert list(sim.scheduler.waiting) == sim.sequences
    sim.run()


def test_restart_begins_with_the_tokens_known_and_step_0() -> None:
    sim = Simulation()
    sim.add(long_prompt(5), max_tokens=9, ignore_eos=True)
    sim.step()
    sim.restart()
    plan = sim.send()
    assert plan and (plan.epoch, plan.step, plan.removed) == (2, 0, b"")
    assert len(unpack(plan.added[0].token_ids)) == 6
    sim.run()


def test_after_a_restart_nothing_is_in_flight() -> None:
    sim = Simulation(max_num_batched_tokens=8)
    for _ in range(2):
        sim.add(long_prompt(8), max_tokens=2, ignore_eos=True)
    for _ in range(2):
        sim.send()
        plan = sim.send()
        assert plan and len(plan.added) == 1
        sim.restart()
    sim.run()


@pytest.mark.parametrize("max_tokens", [1, 4])
def test_cached_tokens_are_those_of_the_first_admission(max_tokens: int) -> None:
    """A worker lost later does not change what the request found."""
    sim = Simulation()
    sim.add(long_prompt(9), max_tokens=1)
    sim.run()
    sequence = sim.add(long_prompt(9), max_tokens=max_tokens, ignore_eos=True)
    sim.send()
    sim.restart()
    sim.run()
    assert sequence.num_cached_tokens == 8


# ---- earlier attempts ------------------------------------------------------------------------


def test_generation_goes_on_behind_an_earlier_attempt() -> None:
    first, sim = Simulation(), Simulation()
    whole = first.add(long_prompt(5), max_tokens=8, ignore_eos=True)
    first.run()
    output = whole.output_token_ids[:4]
    again = sim.add(long_prompt(5), output, max_tokens=8, ignore_eos=True)
    sim.run()
    assert pairs(sim.plans[0].chunks) == [(0, 9)]
    assert again.token_ids == whole.token_ids


@pytest.mark.parametrize(("num_tokens", "reason"), [(4, "stop"), (3, "length")])
def test_what_an_earlier_attempt_ended_is_finished_at_once(num_tokens: int, reason: str) -> None:
    prompt = long_prompt(5)
    seed = seed_for_eos_after(prompt, 4)
    first = Simulation()
    ended = first.add(prompt, seed=seed, max_tokens=num_tokens)
    first.run()
    sim = Simulation()
    again = sim.add(prompt, ended.output_token_ids, seed=seed, max_tokens=num_tokens)
    assert (again.status, again.finish_reason) == (Status.FINISHED, reason)
    assert sim.send() is None
    sim.run()


# ---- the wire --------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "num_tokens"), [(1, 1), (0, 2), (0, 0)])
def test_tokens_of_another_step_are_an_error(step: int, num_tokens: int) -> None:
    sim = Simulation()
    sim.add(max_tokens=3)
    sim.send()
    with pytest.raises(ValueError, match=f"{num_tokens} tokens of step {step}"):
        sim.scheduler.update(SampledTokens(1, step, pack([1] * num_tokens)))


def test_tokens_without_a_plan_are_an_error() -> None:
    with pytest.raises(ValueError, match="0 tokens of step 0"):
        Simulation().scheduler.update(SampledTokens(1, 0, b""))


@pytest.mark.parametrize("num_plans", [1, 2, 3])
def test_an_empty_plan_follows_the_last(num_plans: int) -> None:
    num_ahead = min(1, num_plans - 1)
    sim = Simulation(num_plans_in_flight=num_plans, num_ahead=num_ahead)
    sim.add(max_tokens=1)
    sim.run()
    assert [bool(plan.chunks) for plan in sim.plans] == [True] + [False] * num_ahead
    assert sim.send() is None


def test_row_of_a_sequence() -> None:
    sequence = make_sequence(
        (5, 6), (7,), temperature=0.5, top_k=-1, top_p=0.9, min_p=0.1, seed=-(2**63)
    )
    sequence.slot, sequence.block_table, sequence.num_planned_tokens = 3, [8, 9], 2
    row = row_of(sequence)
    assert (row.slot, row.num_computed_tokens) == (3, 2)
    assert (row.token_ids, row.num_skipped, row.block_ids) == (pack([7]), 2, pack([8, 9]))
    assert row.sampling == {"temperature": 0.5, "top_p": 0.9, "min_p": 0.1}
    assert row.seed == -(2**63)


def test_a_row_with_extras_has_all_tokens() -> None:
    sequence = make_sequence((5, 6), (7,), presence_penalty=1.0)
    sequence.slot, sequence.block_table, sequence.num_planned_tokens = 3, [8, 9], 2
    row = row_of(sequence)
    assert row.extras
    assert (row.token_ids, row.num_skipped) == (pack([5, 6, 7]), 0)


def test_seed_follows_from_the_request_id() -> None:
    one, other = make_sequence(seed=None), make_sequence(seed=None)
    assert one.seed != other.seed
    assert 0 <= one.seed < 2**63
    msgspec.msgpack.encode(row_of(one))


def test_a_steady_decode_plan_is_under_100_bytes() -> None:
    """Batch 256 in blocks of 16, each row at another place in its block."""
    config = Config()
    scheduler = Scheduler(config, 4096, BlockManager(BlockPool(10_000), 16))
    for number in range(256):
        scheduler.add(make_sequence(long_prompt(1 + number % 61), max_tokens=999, ignore_eos=True))
    sizes = []
    while scheduler.num_steps < 300:
        plan = scheduler.schedule()
        assert plan is not None
        if len(scheduler.in_flight[-1].sampled) == 256 and not plan.added:
            sizes.append(len(msgspec.msgpack.encode(plan)))
        step = scheduler.in_flight[0]
        scheduler.update(SampledTokens(0, step.number, pack([1] * len(step.sampled))))
    assert len(sizes) > 250
    assert statistics.median(sizes) < 100


# ---- Number of plans in flight, and when they leave ------------------------------------------


def depth_at(most: int, *step_milliseconds: float) -> int:
    """After twenty steps of each length."""
    depth, now = PlanDepth(most), 0.0
    for milliseconds in step_milliseconds:
        for _ in range(20):
            now += milliseconds / 1000
            depth.on_tokens(now)
    return depth.num_plans


@pytest.mark.parametrize(
    ("milliseconds", "num_plans"), [(0.0, 4), (0.6, 4), (1.6, 3), (3.0, 2), (200.0, 2), (300.0, 1)]
)
def test_short_steps_need_more_plans(milliseconds: float, num_plans: int) -> None:
    assert depth_at(4, milliseconds) == num_plans


def test_never_more_than_allowed() -> None:
    assert [depth_at(most, 0.1) for most in (1, 2, 3, 8)] == [1, 2, 3, 8]
    assert depth_at(1, 200.0) == depth_at(1, 300.0) == 1


def test_begins_with_two_and_goes_back_to_two() -> None:
    assert PlanDepth(4).num_plans == 2
    assert depth_at(4, 0.6, 5.0) == 2
    assert depth_at(4, 5.0, 0.6) == depth_at(4, 300.0, 0.6) == 4


def test_what_is_aborted_in_a_long_step_is_not_planned_on() -> None:
    """The worker sends the tokens at once; it may have kept those of plans sent before."""
    sim = Simulation(max_num_batched_tokens=6, num_plans_in_flight=4, num_ahead=1)
    long = sim.add(long_prompt(30), max_tokens=1)
    sim.scheduler.max_plans = 2
    assert [bool(sim.send()) for _ in range(3)] == [True, True, False]
    sim.scheduler.max_plans = 1
    assert not sim.send()
    sim.receive()
    assert [bool(sim.send()) for _ in range(2)] == [True, False]
    sim.finish(long, "abort")
    assert [plan.is_awaited for plan in sim.plans] == [False, False, True]
    sim.run()
    assert [pairs(plan.chunks) for plan in sim.plans if plan.chunks] == [[(0, 6)]] * 3
    assert not sim.scheduler.in_flight


def test_one_late_step_changes_little() -> None:
    depth = PlanDepth(4)
    for step in range(40):
        depth.on_tokens(step * 0.5e-3 + (0.4e-3 if step == 39 else 0))
    assert depth.num_plans == 4


def test_tokens_leave_before_the_next_plan(
    process: SchedulerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.accept(request())
    assert process.scheduler
    process.scheduler.schedule()
    sampled = SampledTokens(process.scheduler.epoch, 0, pack([5]))
    process.group.members, process.group.epoch = [b"worker"], sampled.epoch
    sent: list[str] = []
    monkeypatch.setattr(process, "schedule", lambda: sent.append("plan"))
    monkeypatch.setattr(process.detokenizers, "send", lambda *_: sent.append("tokens") or True)
    monkeypatch.setattr(process.workers, "receive", lambda: iter([(b"worker", sampled)]))
    process.on_workers()
    assert sent == ["tokens", "plan"]


# ---- Turns of clients, priorities, and long prompts that wait for blocks, in the whole scheduler


def test_short_prompts_pass_one_that_waits_for_blocks_until_it_reserves_them() -> None:
    sim = Simulation(num_blocks=6)
    sim.add(long_prompt(12), max_tokens=4, ignore_eos=True)
    sim.step()
    long = sim.add(long_prompt(16, first=40), max_tokens=1)
    short = [sim.add(long_prompt(8, first=60 + 9 * n), max_tokens=1) for n in range(3)]
    while long.status is Status.WAITING:
        sim.step()
    assert [s.status for s in short] == [Status.FINISHED] * 2 + [Status.WAITING]
    sim.run()


def test_clients_take_turns() -> None:
    sim = Simulation(max_num_seqs=2)
    many = [sim.add(max_tokens=1, client="many") for _ in range(9)]
    one = sim.add(max_tokens=1, client="one")
    sim.send()
    assert [s.status for s in (*many[:2], one)] == [
        Status.DRAINING,
        Status.WAITING,
        Status.DRAINING,
    ]
    sim.run()


def test_lower_priority_values_go_first_in_one_client() -> None:
    sim = Simulation(max_num_seqs=1)
    last, middle, first = [sim.add(max_tokens=1, priority=one) for one in (5, 0, -5)]
    sim.step()
    assert (first.status, middle.status) == (Status.FINISHED, Status.DRAINING)
    assert last.status is Status.WAITING
    sim.run()


def test_the_highest_priority_value_is_preempted_when_blocks_run_out() -> None:
    sim = Simulation(num_blocks=4)
    old = sim.add(long_prompt(8), max_tokens=6, ignore_eos=True, priority=1)
    new = sim.add(long_prompt(4, first=40), max_tokens=6, ignore_eos=True)
    while not sim.scheduler.num_preemptions:
        sim.step()
    assert (old.status, new.status) == (Status.WAITING, Status.RUNNING)
    sim.run()


def test_a_sequence_preempted_often_is_preempted_no_more_for_its_priority() -> None:
    sim = Simulation(num_blocks=64)
    old = sim.add(max_tokens=20, ignore_eos=True, priority=1)
    sim.add(max_tokens=20, ignore_eos=True, client="other")
    for _ in range(MAX_PREEMPTIONS):
        sim.step()
        assert sim.scheduler.running[-1] is old
        sim.preempt(old)
        while old.status is Status.WAITING:
            sim.step()
    assert sim.scheduler.running[0] is old
    sim.run()


# ---- Sequences with `pooling`, which end with their prompt -----------------------------------


EMBED = Pooling()


def test_a_prompt_in_chunks_ends_without_a_token_and_frees_its_blocks() -> None:
    sim = Simulation(max_num_batched_tokens=4, max_model_len=64)
    beside = sim.add(long_prompt(3, first=90), max_tokens=9, ignore_eos=True)
    pooled = sim.add(long_prompt(11), pooling=EMBED)
    sim.run()
    assert (pooled.output_token_ids, pooled.finish_reason) == ([], "stop")
    assert pooled.pooled == pooled_of(long_prompt(11))
    assert len(beside.output_token_ids) == 9


def test_a_prompt_may_fill_the_context() -> None:
    sim = Simulation(max_model_len=8, num_blocks=2)
    full = sim.add(long_prompt(8), pooling=EMBED)
    with pytest.raises(CannotFitError, match="got 9 tokens, expected up to 8, which fit"):
        sim.add(long_prompt(9), pooling=EMBED)
    sim.run()
    assert full.pooled == pooled_of(long_prompt(8))


def test_prompts_share_the_prefix_cache_with_text() -> None:
    sim = Simulation()
    sim.add(long_prompt(9), max_tokens=1)
    pooled = sim.add(long_prompt(9), pooling=EMBED)
    text = sim.add([*long_prompt(9), 5], max_tokens=1)
    sim.run()
    assert (pooled.num_cached_tokens, text.num_cached_tokens) == (8, 8)


def test_the_result_outlives_preemption_and_workers() -> None:
    sim = Simulation(max_num_batched_tokens=4, num_plans_in_flight=1)
    pooled = sim.add(long_prompt(11), pooling=EMBED)
    sim.step()
    sim.preempt(pooled)
    sim.step()
    sim.restart()
    for _ in range(3):
        sim.step()
    assert pooled.pooled == pooled_of(long_prompt(11))
    sim.restart()
    sim.run()
    assert pooled.num_preemptions == 2


def test_a_row_of_labels_is_checked_and_sent_as_it_is() -> None:
    labels = Pooling(label_ids=[7, 264])
    sequence = make_sequence((5, 6), pooling=labels)
    assert row_of(sequence).extras == RowExtras(2, end_token_ids=[0], pooling=labels)
    with pytest.raises(CannotFitError, match=r"pooling.label_ids: got token id 264"):
        sequence.check(264)


def test_a_stream_is_opened_with_the_result_by_every_detokenizer_that_gets_it() -> None:
    """Not before there is a result, or the detokenizer would wait for tokens."""
    desk = Desk("a")
    (sequence,) = desk.open(pooling=EMBED)
    desk.streams.reopen(sequence)
    desk.deliver()
    assert not desk.readers[b"a"].opened
    assert sequence.set_pooled(b"1234")
    sequence.finish_reason = "stop"
    desk.end(sequence)
    desk.deliver()
    desk.streams.lost(b"a")
    desk.come("b")
    desk.deliver()
    for reader in desk.readers.values():
        (opened,) = reader.opened
        assert (opened.pooled, opened.finish_reason, opened.output_token_ids) == (
            b"1234",
            "stop",
            b"",
        )
