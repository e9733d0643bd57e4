"""Requests that the scheduler refuses for a while: those it has given up."""

import pytest

from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.plan import SampledTokens
from penstock.protocol.messages.worker import WorkerState
from penstock.services.scheduler.process import SchedulerProcess
from tests.services.scheduler.processes import NUM_BLOCKS, Gateway, request

POISON = 99
INNOCENT = [(1, 2, 3), (4, 5), (6,)]


def run_step(process: SchedulerProcess) -> None:
    """Make a plan; the workers die of it if it has poison, or its tokens come back."""
    scheduler = process.scheduler
    assert scheduler
    scheduler.schedule()
    if any(POISON in one.token_ids for step in scheduler.in_flight for one in step.sequences):
        restart_workers(process)
        return
    oldest = scheduler.in_flight[0]
    tokens = SampledTokens(scheduler.epoch, oldest.number, pack([5] * len(oldest.sampled)))
    scheduler.update(tokens)


def restart_workers(process: SchedulerProcess) -> None:
    process.group.lost(b"w")
    process.group.on_state(b"w", WorkerState("worker.1", num_blocks=NUM_BLOCKS, block_size=4))
    process.start_group()


@pytest.mark.parametrize("pause", [1, 2, 3, 4, 5])
def test_only_what_was_given_up_is_refused(
    process: SchedulerProcess, gateway: Gateway, pause: int
) -> None:
    """Other poison comes while those that ran with the one before are suspects."""
    restart_workers(process)
    for number, prompt in enumerate(INNOCENT):
        process.accept(request(1, f"innocent {number}", prompt))
    poison = [f"poison {number}" for number in range(6)]
    for number, name in enumerate(poison):
        process.accept(request(1, name, (POISON, number)))
        for _ in range(pause):
            run_step(process)
    assert set(process.requests) >= {f"innocent {number}" for number in range(len(INNOCENT))}
    for _ in range(100):
        if not set(process.requests) & set(poison):
            break
        run_step(process)
    failed = gateway.failures(process)
    assert {one.request_id for one in failed if one.is_poison} == set(poison)
    for number, prompt in enumerate(INNOCENT):
        process.accept(request(2, f"again {number}", prompt))
    assert not gateway.failures(process)
    process.accept(request(2, "refused", (POISON, 0)))
    assert [one.request_id for one in gateway.failures(process)] == ["refused"]


def test_poison_whose_client_leaves_at_its_last_death_is_refused(
    process: SchedulerProcess, gateway: Gateway
) -> None:
    """The workers die of a plan that is in flight when the request is released."""
    restart_workers(process)
    process.accept(request(1, "poison", (POISON,)))
    run_step(process)
    run_step(process)
    assert process.scheduler
    process.scheduler.schedule()
    process.release("poison", 1)
    restart_workers(process)
    gateway.failures(process)
    process.accept(request(2, "again", (POISON,)))
    (refused,) = gateway.failures(process)
    assert refused.request_id == "again"
