"""A preempted sequence with recurrent state continues from the blocks and state kept for it.

The reference worker checks the position and the tokens of each block and state that is read.
"""

import msgspec
import pytest

from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.plan import SampledTokens
from penstock.protocol.messages.structured import GRAMMAR_FAILED, StructuredOutputs
from penstock.services.scheduler.blocks import state_blocks
from penstock.services.scheduler.sequence import Sequence
from tests.services.scheduler.blocks.test_offload import offload_of
from tests.services.scheduler.blocks.test_offloaded_checkpoints import with_states
from tests.services.scheduler.builders import long_prompt
from tests.services.scheduler.simulation import Simulation

SIZES = {"num_state_blocks": 6, "num_blocks": 12, "max_model_len": 40}


@pytest.fixture(autouse=True)
def chunks_of_8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks."""
    monkeypatch.setattr(state_blocks, "STATE_CHUNK", 8)


def decoding(sim: Simulation, num_output: int = 3) -> Sequence:
    """Return a sequence that has a prompt of 10 tokens and some of its output tokens."""
    sequence = sim.add(long_prompt(10), max_tokens=28, ignore_eos=True)
    while len(sequence.output_token_ids) < num_output:
        sim.step()
    return sequence


def evict(sim: Simulation, preempted: Sequence) -> None:
    """Let others take all blocks of the workers before the sequence comes back."""
    sim.scheduler.waiting.remove(preempted)
    prompts = [[first, *long_prompt(20)] for first in range(50, 54)]
    others = [sim.add(prompt, max_tokens=8, ignore_eos=True) for prompt in prompts]
    while any(other.finish_reason is None for other in others):
        sim.step()
    sim.scheduler.waiting.put_back(preempted)


def preempt(sim: Simulation, sequence: Sequence) -> None:
    """Preempt a sequence, and take the tokens of its plans in flight."""
    sim.preempt(sequence)
    while sim.has_result:
        sim.receive()


def preempt_and_die(sim: Simulation, sequence: Sequence, num_results: int) -> None:
    """Preempt a sequence after some results, lose its workers, and finish with others."""
    for _ in range(num_results):
        if sim.has_result:
            sim.receive()
    sim.preempt(sequence)
    sim.restart(keeps_memory=True)
    sim.run()


@pytest.mark.parametrize("method", ["none", "mtp"])
@pytest.mark.parametrize("num_output", range(1, 10))
@pytest.mark.parametrize("is_evicted", [False, True])
def test_nothing_is_computed_again(num_output: int, is_evicted: bool, method: str) -> None:
    sim = with_states(**SIZES, speculative_method=method)
    sequence = decoding(sim, num_output)
    preempt(sim, sequence)
    if is_evicted:
        evict(sim, sequence)
    sim.run()
    assert sim.scheduler.num_recomputed_tokens == 0
    assert (offload_of(sim).num_loaded > 0) == is_evicted


def test_blocks_of_wrong_drafts_only_are_kept_too() -> None:
    """Each block that is found on the host needs a place, even if no token needs the block."""
    for seed in range(60):  # until the last draft is wrong
        sim = with_states(**SIZES, speculative_method="mtp")
        sequence = sim.add(long_prompt(10), max_tokens=28, ignore_eos=True, seed=seed)
        while (sequence.num_planned_tokens - 1) // 4 <= len(sequence.token_ids) // 4:
            sim.send() or sim.receive()
        preempt(sim, sequence)
        has_more = len(sequence.block_hashes) * 4 - len(sequence.token_ids) >= 4
        evict(sim, sequence)
        sim.run()
        assert sim.scheduler.num_recomputed_tokens == 0
        if has_more:
            return
    raise AssertionError("no block was of wrong drafts only")


@pytest.mark.parametrize("num_more", range(1, 5))
def test_a_sequence_is_preempted_several_times(num_more: int) -> None:
    sim = with_states(200, **SIZES)
    sequence = decoding(sim)
    for _ in range(3):
        preempt(sim, sequence)
        evict(sim, sequence)
        wanted = len(sequence.token_ids) + num_more
        while len(sequence.token_ids) < wanted:
            sim.step()
    sim.run()
    assert sim.scheduler.num_recomputed_tokens == 0


def test_what_was_kept_is_forgotten_when_the_sequence_continues() -> None:
    """In the workers' blocks and on the host."""
    sim = with_states(**SIZES)
    sequence = decoding(sim)
    preempt(sim, sequence)
    hashes = sequence.block_hashes[-sequence.num_kept_blocks :]
    evict(sim, sequence)
    pieces = [key for _, key in offload_of(sim).pieces(0, hashes[-1])]
    assert offload_of(sim).num_found([*hashes, *pieces], False) == len(hashes) + len(pieces)
    sim.run()
    assert not any(offload_of(sim).find([key]) for key in [*hashes, *pieces])
    assert not sim.pool.match([(hashes[0], b"")])


@pytest.mark.parametrize("is_evicted", [False, True])
def test_what_was_kept_is_forgotten_when_the_request_is_aborted(is_evicted: bool) -> None:
    sim = with_states(**SIZES)
    sequence = decoding(sim)
    preempt(sim, sequence)
    hashes = sequence.block_hashes[-sequence.num_kept_blocks :]
    if is_evicted:
        evict(sim, sequence)
    sim.finish(sequence, "abort")
    assert not any(offload_of(sim).find([key]) for key in hashes)
    assert not any(map(sim.pool.has, [(key, b"") for key in hashes]))
    sim.run()


@pytest.mark.parametrize("index", range(3))
def test_a_sequence_needs_all_that_was_kept(index: int) -> None:
    """Otherwise it is computed again from the checkpoint of its prompt."""
    sim = with_states(**SIZES)
    sequence = decoding(sim, 6)
    preempt(sim, sequence)
    evict(sim, sequence)
    hashes = sequence.block_hashes[-sequence.num_kept_blocks :]
    keys = [hashes[0], hashes[-1], list(offload_of(sim).pieces(0, hashes[-1]))[1][1]]
    offload_of(sim).discard([keys[index]])
    sim.send()
    assert max(sequence.checkpoints) <= 10, "of sampled tokens"
    sim.run()
    assert sim.scheduler.num_recomputed_tokens > 4
    assert sequence.finish_reason == "length"


def test_tokens_that_are_computed_again_are_kept_as_far_as_they_are() -> None:
    sim = with_states(**SIZES, max_num_batched_tokens=12)
    sequence = decoding(sim, 25)
    sim.restart()
    sim.send()
    while sequence.num_planned_tokens <= 8:
        sim.send()
    assert 10 < sequence.num_planned_tokens < len(sequence.token_ids) - 1
    preempt(sim, sequence)
    num_lost = sequence.num_lost_tokens
    sim.run()
    assert sim.scheduler.num_recomputed_tokens == num_lost


@pytest.mark.parametrize("num_results", range(3))
@pytest.mark.parametrize("are_planned", [False, True])
def test_a_sequence_is_preempted_again_before_it_has_loaded(
    are_planned: bool, num_results: int
) -> None:
    """And its workers die, while copies to its blocks are not planned, or may not have run."""
    sim = with_states(**SIZES, max_num_batched_tokens=12, num_plans_in_flight=4)
    sequence = decoding(sim, 6)
    preempt(sim, sequence)
    evict(sim, sequence)
    sim.scheduler.waiting.remove(sequence)
    sim.add([9], max_tokens=20, ignore_eos=True)
    sim.step()
    sim.scheduler.waiting.put_back(sequence)
    while sequence not in sim.scheduler.running or bool(sequence.loads) == are_planned:
        sim.send() or sim.receive()
    preempt_and_die(sim, sequence, num_results)


@pytest.mark.parametrize("num_results", range(3))
def test_a_checkpoint_that_may_not_have_been_loaded_is_not_kept(num_results: int) -> None:
    options = {"num_state_blocks": 5, "num_blocks": 40, "max_num_batched_tokens": 24}
    sim = with_states(max_model_len=40, num_plans_in_flight=4, **options)
    sim.add(long_prompt(17), max_tokens=2)
    sim.run()
    for first in range(50, 56):  # evict the checkpoint, but not the blocks
        sim.add([first, *long_prompt(8)], max_tokens=2)
        sim.run()
    sim.add([9], max_tokens=25, ignore_eos=True)
    sim.step()
    sequence = sim.add(long_prompt(19), max_tokens=5, ignore_eos=True)
    while sequence not in sim.scheduler.running or sequence.loads:
        sim.send() or sim.receive()
    preempt_and_die(sim, sequence, num_results)


@pytest.mark.parametrize("num_sent", [1, 2, 3])
def test_a_grammar_fails_while_its_sequence_is_preempted(num_sent: int) -> None:
    """Plans in flight then bring fewer tokens than they computed."""
    sim = with_states(**SIZES, num_plans_in_flight=4)
    grammar = StructuredOutputs(json_object=True)
    sampling = {"ignore_eos": True, "structured_outputs": grammar, "seed": 5}
    sequence = sim.add(long_prompt(10), max_tokens=20, **sampling)
    while not sequence.output_token_ids or sim.has_result:
        sim.step() if not sequence.output_token_ids else sim.receive()
    for _ in range(num_sent):
        sim.send()
    sim.preempt(sequence)
    assert sequence.num_kept_blocks
    while sim.results:
        result = msgspec.msgpack.decode(sim.results.popleft(), type=SampledTokens)
        number = len(sim.scheduler.in_flight[0].sampled)
        result.token_ids = pack([1] * number)
        result.failed = [(row, f"{GRAMMAR_FAILED}: too deep") for row in range(number)]
        sim.scheduler.update(result)
    sim.send()
    assert sequence.num_planned_tokens >= 8, "the checkpoint of its prompt"


def test_what_is_kept_gets_no_files() -> None:
    sim = with_states(**SIZES, kv_offload_folder="folder")
    sequence = decoding(sim)
    preempt(sim, sequence)
    hashes = sequence.block_hashes[-sequence.num_kept_blocks :]
    evict(sim, sequence)
    keys = [*hashes, *(key for _, key in offload_of(sim).pieces(0, hashes[-1]))]
    assert offload_of(sim).own >= set(keys)
    sim.scheduler.waiting.remove(sequence)
    sim.restart(keeps_memory=True)
    for _ in range(60):
        sim.send()
        sim.answer()
        if sim.has_result:
            sim.receive()
    sim.scheduler.waiting.put_back(sequence)
    assert sim.worker.host.files
    assert not sim.worker.host.files.keys() & keys
    sim.run()
    assert not offload_of(sim).own
    assert sim.scheduler.num_recomputed_tokens == 0


def test_without_a_host_tier_nothing_is_kept_after_the_prompt() -> None:
    sim = with_states(num_host_slots=0, **SIZES)
    sequence = decoding(sim)
    preempt(sim, sequence)
    assert sequence.num_kept_blocks == 0
    sim.run()


@pytest.mark.parametrize("num_host_slots", [0, 40])
def test_a_prompt_continues_where_it_was_preempted(num_host_slots: int) -> None:
    sim = with_states(num_host_slots, **SIZES, max_num_batched_tokens=12)
    sequence = sim.add(long_prompt(30), max_tokens=2)
    sim.send()
    sim.send()
    assert 0 < sequence.num_planned_tokens < 30
    preempt(sim, sequence)
    sim.run()
    assert sim.scheduler.num_recomputed_tokens == 0


@pytest.mark.parametrize("num_tokens", [11, 12])
def test_a_state_between_two_chunks_is_no_checkpoint(num_tokens: int) -> None:
    """Other requests would compute their prompts in another order of arithmetic."""
    sim = with_states(**SIZES)
    sequence = sim.add(long_prompt(num_tokens), max_tokens=9, ignore_eos=True)
    while sequence.num_planned_tokens < num_tokens:
        sim.send()
    preempt(sim, sequence)
    other = sim.add([*long_prompt(12), 9, 9, 9], max_tokens=2)
    sim.run()
    assert other.num_cached_tokens == 8


@pytest.mark.parametrize("num_sent", range(1, 5))
def test_workers_die_while_a_prompt_is_preempted(num_sent: int) -> None:
    sim = with_states(**SIZES, max_num_batched_tokens=12, num_plans_in_flight=4)
    sequence = sim.add(long_prompt(39), max_tokens=1)
    for _ in range(num_sent):
        sim.send()
    num_planned = sequence.num_planned_tokens
    sim.preempt(sequence)
    sim.restart(keeps_memory=True)
    sim.run()
    assert sim.scheduler.num_recomputed_tokens > 0
    sim.add(long_prompt(num_planned + 2), max_tokens=1)  # must not begin at what was lost
    sim.run()


@pytest.mark.parametrize("keeps_memory", [False, True])
@pytest.mark.parametrize("num_sent", range(4))
def test_workers_die_while_a_sequence_is_preempted(num_sent: int, keeps_memory: bool) -> None:
    """Whatever plans in flight wrote is uncertain, and what others wrote is not."""
    sim = with_states(**SIZES, num_plans_in_flight=4)
    sequence = decoding(sim)
    for _ in range(num_sent):
        sim.send()
    sim.preempt(sequence)
    sim.restart(keeps_memory=keeps_memory)
    sim.run()
    assert sequence.finish_reason == "length"


def test_workers_die_after_a_sequence_was_preempted() -> None:
    sim = with_states(**SIZES)
    sequence = decoding(sim)
    preempt(sim, sequence)
    sim.restart(keeps_memory=True)
    sim.run()
    assert sim.scheduler.num_recomputed_tokens == 0
