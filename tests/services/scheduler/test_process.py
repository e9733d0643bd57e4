"""The scheduler's process: which attempt at a request counts, and what lost workers do."""

import pytest
from msgspec.structs import replace

from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.pipeline import StopFound, TokenizedRequest
from penstock.protocol.messages.plan import SampledTokens
from penstock.protocol.messages.sampling import SamplingParams
from penstock.protocol.messages.worker import WorkerState
from penstock.protocol.transport.process import first_number
from penstock.services.scheduler import sequence as sequence_module
from penstock.services.scheduler.poison import SequencePoison
from penstock.services.scheduler.process import SchedulerProcess
from penstock.services.scheduler.sequence import Status
from penstock.services.scheduler.step_costs import FIRST_TOKENS
from tests.services.scheduler.processes import (
    INCARNATION,
    NUM_BLOCKS,
    SAMPLING,
    Gateway,
    Reports,
    deltas,
    opened,
    request,
    say,
    step,
)

# ---- attempts --------------------------------------------------------------------------------


@pytest.mark.parametrize("attempt", [0, 1_000])
def test_a_request_that_has_ended_is_told_again(process: SchedulerProcess, attempt: int) -> None:
    process.accept(request())
    sequence = process.requests["r"]
    step(process, 7)
    step(process, 8)
    assert process.scheduler
    process.scheduler.finish(sequence, "stop")
    opened(process)
    process.accept(request(attempt))
    assert process.requests["r"] is sequence
    (again,) = opened(process)
    assert (again.request_id, again.attempt, again.finish_reason) == ("r", attempt, "stop")
    assert again.output_token_ids == pack([7, 8])


@pytest.mark.parametrize("output", [(), (5,), (5, 6)])
def test_a_later_attempt_takes_over_what_runs(
    process: SchedulerProcess, output: tuple[int, ...]
) -> None:
    """Nothing is computed again; the detokenizer sends all from the start."""
    process.accept(request())
    sequence = process.requests["r"]
    step(process, 5)
    step(process, 6)
    (old,) = opened(process)
    process.accept(request(1_000, output=output))
    assert process.requests["r"] is sequence
    assert (sequence.attempt, sequence.status) == (1_000, Status.RUNNING)
    step(process, 7)
    (delta,) = deltas(process)
    assert delta.closed == [old.stream_id]
    assert [(one.attempt, one.output_token_ids) for one in delta.opened] == [(1_000, pack([5, 6]))]
    assert (delta.stream_ids, delta.token_ids) == (pack([sequence.stream_id]), pack([7]))


@pytest.mark.parametrize("output", [(), (5,)])
def test_lost_logprobs_are_computed(process: SchedulerProcess, output: tuple[int, ...]) -> None:
    """An earlier scheduler had the first token's; a request with this token has them, too."""
    sampling = SamplingParams(max_tokens=9, logprobs=0)
    process.accept(request(1, output=(5,), sampling=sampling))
    first = process.requests["r"]
    process.accept(request(1_000, output=output, sampling=sampling))
    assert (process.requests["r"] is first) == bool(output)


def test_a_request_that_waits_is_taken_over(process: SchedulerProcess) -> None:
    process.accept(request())
    sequence = process.requests["r"]
    process.accept(request(1_000))
    assert process.scheduler
    assert list(process.scheduler.waiting) == [sequence]
    step(process)
    assert [one.attempt for one in opened(process)] == [1_000]


def test_an_earlier_attempt_changes_nothing(process: SchedulerProcess) -> None:
    process.accept(request(attempt=2))
    sequence = process.requests["r"]
    process.accept(request(attempt=1))
    process.accept(request(attempt=1, prompt=(4,)))
    assert process.requests == {"r": sequence}
    assert sequence.attempt == 2
    assert opened(process) == []


OTHERS = {
    "another prompt": request(1, prompt=(1, 2, 4)),
    "a longer prompt": request(1, prompt=(1, 2, 3, 5)),
    "a shorter prompt": request(1, prompt=(1, 2), output=(3, 5)),
    "another sampling": request(1, sampling=SamplingParams(temperature=1.0, max_tokens=9)),
    "another output": request(1, output=(6,)),
    "more output": request(1, output=(5, 5)),
    "another prompt of the same attempt": request(0, prompt=(1, 2, 4)),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_another_request_takes_the_place_of_the_first(
    process: SchedulerProcess, other: TokenizedRequest
) -> None:
    process.accept(request())
    first = process.requests["r"]
    step(process, 5)
    process.accept(other)
    second = process.requests["r"]
    assert (first.finish_reason, first.block_table) == ("abort", [])
    assert (second.attempt, second.status) == (other.attempt, Status.WAITING)
    assert pack(second.output_token_ids) == other.output_token_ids


@pytest.mark.parametrize(("attempt", "reason"), [(0, None), (1_000, "stop")])
def test_a_stop_string_ends_the_attempt_that_it_was_found_in(
    process: SchedulerProcess, attempt: int, reason: str | None
) -> None:
    process.accept(request())
    step(process)
    say(process, request(1_000), StopFound("r", attempt))
    assert process.requests["r"].finish_reason == reason


# ---- lost workers ----------------------------------------------------------------------------


def test_a_request_that_kills_workers_is_answered_with_an_error(
    process: SchedulerProcess, gateway: Gateway
) -> None:
    process.accept(request(3, "poison"))
    for _ in range(3):
        assert process.scheduler
        process.scheduler.schedule()
        process.accept(request(3, "late"))
        process.group.lost(b"w")
        process.group.on_state(b"w", WorkerState("worker.1", num_blocks=NUM_BLOCKS, block_size=4))
        process.start_group()
    (failed,) = gateway.failures(process)
    assert (failed.request_id, failed.attempt, failed.error.code) == ("poison", 3, "failed")
    assert "the workers died 3 times in a row" in failed.error.message
    assert set(process.requests) == {"late"}


@pytest.mark.parametrize("field", ["num_blocks", "num_state_blocks"])
def test_workers_must_not_return_with_fewer_blocks(fresh: SchedulerProcess, field: str) -> None:
    """The scheduler's tables have all that there were; the next scheduler makes smaller ones."""
    numbers = {"num_blocks": NUM_BLOCKS, "num_state_blocks": NUM_BLOCKS}
    for one in (numbers, numbers):
        fresh.group.lost(b"w")
        fresh.group.on_state(b"w", WorkerState("worker.1", block_size=4, **one))
        fresh.start_group()
    numbers[field] -= 1
    fresh.group.lost(b"w")
    fresh.group.on_state(b"w", WorkerState("worker.1", block_size=4, **numbers))
    with pytest.raises(SystemExit, match=f"{field}: the restarted workers have {NUM_BLOCKS - 1}"):
        fresh.start_group()


def test_new_workers_begin_with_short_chunks(fresh: SchedulerProcess) -> None:
    fresh.group.on_state(b"w", WorkerState("worker.1", num_blocks=40, block_size=4))
    fresh.start_group()
    fresh.accept(request(prompt=tuple(range(100))))
    assert fresh.scheduler
    fresh.scheduler.schedule()
    assert fresh.scheduler.in_flight[0].chunk_ends == [FIRST_TOKENS]


def test_the_scheduler_knows_to_what_workers_pad(fresh: SchedulerProcess) -> None:
    state = WorkerState("worker.1", num_blocks=40, block_size=4)
    state.step_sizes, state.tile_sizes = [64, 128], [16, 32]
    fresh.group.on_state(b"w", state)
    fresh.start_group()
    assert fresh.scheduler
    costs = fresh.scheduler.step_costs
    assert (costs.sizes, costs.tiles) == ([64, 128], [16, 32])


def test_deaths_are_counted_over_replicas(process: SchedulerProcess, gateway: Gateway) -> None:
    """Deaths elsewhere came with the request; deaths here are reported once the workers died.

    The request may continue in another replica.
    """
    process.group.on_state(b"w", WorkerState("worker.1", num_blocks=NUM_BLOCKS, block_size=4))
    process.start_group()
    twice = request(3, "twice")
    twice.num_deaths = 2
    assert process.scheduler
    process.accept(request(3, "once"))
    process.scheduler.schedule()
    process.accept(request(3, "waits"))
    process.group.lost(b"w")
    process.send_status()
    assert gateway.results.socket.poll(60_000)
    ((_, status),) = gateway.results.receive()
    assert (status.workers_ready, status.num_deaths) == (False, {"once": 1})
    restart_workers(process, 10)
    process.accept(twice)
    process.scheduler.schedule()
    process.group.lost(b"w")
    (failed,) = gateway.failures(process)
    assert failed.request_id == "twice"


def restart_workers(process: SchedulerProcess, pid: int) -> None:
    """After a step, for a worker's death with it in flight."""
    state = WorkerState("worker.1", num_blocks=NUM_BLOCKS, block_size=4, pid=pid)
    process.group.lost(b"w")
    process.group.on_state(b"w", state)
    process.start_group()


def test_poison_is_refused_when_it_is_sent_again(
    process: SchedulerProcess, gateway: Gateway
) -> None:
    reports = Reports()
    process.poison = SequencePoison(reports)  # type: ignore[arg-type]
    restart_workers(process, 10)
    process.accept(request(3, "poison"))
    process.accept(request(3, "other", prompt=(7,)))
    for pid in (11, 12, 13):
        assert process.scheduler
        process.scheduler.schedule()
        restart_workers(process, pid)
    assert [one.is_poison for one in gateway.failures(process)] == [True]
    assert reports.died_with[1:] == [
        ([("worker.1", pid)], n) for pid, n in ((10, 2), (11, 2), (12, 1))
    ]
    assert reports.num_found == 1
    assert reports.num_cleared == 0
    assert process.scheduler
    process.scheduler.schedule()
    (plan,) = process.scheduler.in_flight
    tokens = pack([5] * len(plan.sampled))
    process.on_tokens(SampledTokens(process.scheduler.epoch, plan.number, tokens))
    assert reports.num_cleared == 1, "the other request has got a token"
    again = request(9, "again", sampling=replace(SAMPLING, seed=5))
    process.accept(again)
    (refused,) = gateway.failures(process)
    assert (refused.request_id, refused.is_poison, refused.error.code) == ("again", True, "failed")
    process.accept(request(9, "longer", prompt=(1, 2, 3, 4)))
    assert set(process.requests) == {"other", "longer"}


def test_who_leaves_and_asks_again_is_as_suspect_as_before(process: SchedulerProcess) -> None:
    assert process.scheduler
    process.poison = SequencePoison(Reports())  # type: ignore[arg-type]
    restart_workers(process, 10)
    for number in range(2):
        process.accept(request(number, f"r{number}"))
        assert process.requests[f"r{number}"].num_deaths == number
        process.scheduler.schedule()
        restart_workers(process, 11 + number)
        process.release(f"r{number}", number)
    process.accept(request(5, "last"))
    assert process.requests["last"].num_deaths == 2
    step(process)
    process.release("last", 5)
    process.accept(request(6, "cleared"))
    assert process.requests["cleared"].num_deaths == 0


def test_a_row_that_fails_is_answered_with_an_error(
    process: SchedulerProcess, gateway: Gateway
) -> None:
    """A row fails once, whatever is in flight of it; the other row continues."""
    assert process.scheduler
    for name in ("stuck", "other"):
        process.accept(request(3, name))
    for _ in range(2):
        process.scheduler.schedule()
    for number, failed in enumerate([[(0, "no way out")], [(0, "still none")]]):
        process.on_tokens(SampledTokens(0, number, pack([5, 6]), failed=failed))
    (told,) = gateway.failures(process)
    assert (told.request_id, told.attempt, told.error.code) == ("stuck", 3, "failed")
    assert told.error.message == "no way out"
    assert set(process.requests) == {"other"}
    assert process.requests["other"].output_token_ids == [6, 6]
    assert [one.request_id for one in opened(process)] == ["other"]


def test_a_worker_that_can_t_be_reached_has_lost_its_place(
    process: SchedulerProcess,
) -> None:
    """Nobody starts another one in its place when it was not started by the supervisor."""
    process.group.on_state(b"w", WorkerState("worker.1", num_blocks=NUM_BLOCKS, block_size=4))
    assert process.ready
    process.on_heartbeat()
    assert (process.group.members, process.ready) == ([], False)


def test_one_that_comes_back_is_older_than_one_in_its_place(process: SchedulerProcess) -> None:
    """Its machine was cut off, and the gateway has the reports of another scheduler since."""
    before, epoch_of_another = process.epoch, first_number(INCARNATION + 1)
    process.renew_epoch()
    assert before < process.epoch < epoch_of_another


@pytest.mark.parametrize(
    ("prompt", "prompt_logprobs", "message"),
    [
        ((1,) * 64, None, "prompt: got 64 tokens, expected up to 63, which fit"),
        ((1, 99_999), None, "prompt: got token id 99999, expected up to"),
        ((1,) * 50, 20, "prompt_logprobs: got 20 for a prompt of 50 tokens, expected up to 1000"),
    ],
)
def test_a_request_that_can_t_fit_is_answered_with_its_attempt(
    process: SchedulerProcess,
    gateway: Gateway,
    monkeypatch: pytest.MonkeyPatch,
    prompt: tuple[int, ...],
    prompt_logprobs: int | None,
    message: str,
) -> None:
    monkeypatch.setattr(sequence_module, "MAX_PROMPT_LOGPROBS", 1000)
    process.accept(request(2, "fits", prompt[:1] * 50, sampling=SamplingParams(prompt_logprobs=19)))
    sampling = SamplingParams(prompt_logprobs=prompt_logprobs)
    process.accept(request(3, prompt=prompt, sampling=sampling))
    (failed,) = gateway.failures(process)
    assert message in failed.error.message
    assert failed.error.field == message.partition(":")[0]
    assert (failed.request_id, failed.attempt, failed.error.code) == ("r", 3, "invalid")
    assert set(process.requests) == {"fits"}
