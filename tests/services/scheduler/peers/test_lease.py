"""The lease of requests that an earlier gateway left running."""

from types import SimpleNamespace
from typing import Any

from penstock.protocol.messages.pipeline import GatewayStarted, ReleaseRequest
from penstock.protocol.messages.sampling import SamplingParams
from penstock.protocol.messages.worker import WorkerState
from penstock.protocol.transport.channel import Channel
from penstock.services.scheduler.process import Lease, SchedulerProcess
from penstock.services.scheduler.sequence import Status
from tests.services.scheduler.processes import NUM_BLOCKS, Gateway, opened, request, say, step

# ---- Time in which a new gateway may claim running requests ----------------------------------


REQUESTS: list[Any] = [SimpleNamespace(attempt=n) for n in (5, 6, 7, 8)]


def expired(lease: Lease, now: float) -> list[int]:
    return [one.attempt for one in lease.take_expired(REQUESTS, now)]


def test_a_lease_ends_once() -> None:
    lease = Lease(30.0)
    assert expired(lease, 1e9) == []
    lease.begin(7, now=100.0)
    assert lease.first_attempt == 7
    found = [expired(lease, now) for now in (100.0, 129.9, 130.0, 130.5)]
    assert found == [[], [], [5, 6], []]


def test_what_is_not_claimed_is_known_while_the_lease_lasts() -> None:
    lease = Lease(30.0)
    assert lease.unclaimed(REQUESTS) == []
    lease.begin(7, now=100.0)
    assert lease.unclaimed(REQUESTS) == REQUESTS[:2]
    assert expired(lease, 130.0)
    assert lease.unclaimed(REQUESTS) == []


def test_a_second_gateway_begins_another_lease() -> None:
    lease = Lease(30.0)
    lease.begin(7, now=100.0)
    lease.begin(9, now=120.0)
    assert lease.first_attempt == 9
    assert [expired(lease, now) for now in (130.0, 150.0)] == [[], [5, 6, 7, 8]]


def test_late_news_of_an_earlier_gateway_changes_nothing() -> None:
    lease = Lease(30.0)
    lease.begin(9, now=100.0)
    for first_attempt in (7, 9):
        lease.begin(first_attempt, now=120.0)
    assert lease.first_attempt == 9
    assert expired(lease, 130.0) == [5, 6, 7, 8]


# ---- A new gateway at the scheduler's process: resubmitted requests continue, others end -----


def test_what_nobody_asks_a_new_gateway_for_is_released(
    process: SchedulerProcess, detokenizer: Channel[Any]
) -> None:
    say(process, request(7, "left"), request(7, "wanted"))
    step(process)
    opened(process)
    left, wanted = process.requests.values()
    say(process, GatewayStarted(1_000), request(1_000, "wanted"), request(1_000, "new"))
    assert left.status is Status.RUNNING
    process.on_heartbeat()
    assert set(process.requests) == {"wanted", "new"}
    assert process.requests["wanted"] is wanted
    assert (left.finish_reason, left.block_table) == ("abort", [])
    received: list[Any] = []
    while len(received) < 2:
        assert detokenizer.socket.poll(60_000)
        received += [message for _, message in detokenizer.receive()]
    assert [len(delta.opened) for delta in received] == [1, 0]
    assert received[1].closed == [left.stream_id]


def test_a_new_gateway_is_told_of_the_scheduler_at_once(
    process: SchedulerProcess, gateway: Gateway
) -> None:
    say(process, GatewayStarted(1_000))
    assert gateway.results.socket.poll(60_000)
    [(_, received)] = gateway.results.receive()
    assert received.epoch == process.epoch


def test_a_lease_is_over_when_its_time_is(process: SchedulerProcess) -> None:
    process.lease = Lease(3600.0)
    say(process, request(7), GatewayStarted(1_000))
    process.on_heartbeat()
    assert set(process.requests) == {"r"}


def test_what_comes_late_from_an_old_gateway_is_dropped(process: SchedulerProcess) -> None:
    say(process, GatewayStarted(1_000), request(999), request(1_000, "new"))
    assert set(process.requests) == {"new"}


def test_requests_before_the_first_worker_have_a_lease_too(fresh: SchedulerProcess) -> None:
    say(fresh, request(7, "left"), request(7, "wanted"), GatewayStarted(1_000))
    say(fresh, request(1_000, "wanted"))
    fresh.on_heartbeat()
    assert [(one.request_id, one.attempt) for one in fresh.requests.values()] == [("wanted", 1_000)]


def test_requests_before_the_first_worker_are_accepted_within_their_lease(
    fresh: SchedulerProcess,
) -> None:
    """The later attempt of one takes the earlier over."""
    say(fresh, request(7, "left"), request(7, "wanted"), GatewayStarted(1_000))
    say(fresh, request(1_000, "wanted"), ReleaseRequest("nobody", 1_000))
    fresh.group.on_state(b"w", WorkerState("worker.1", num_blocks=NUM_BLOCKS, block_size=4))
    fresh.start_group()
    assert {one.request_id: one.attempt for one in fresh.requests.values()} == {
        "left": 7,
        "wanted": 1_000,
    }
    assert fresh.scheduler
    assert [one.request_id for one in fresh.scheduler.waiting] == ["left", "wanted"]


def test_a_request_that_had_ended_gets_its_end_from_the_first_worker_on(
    fresh: SchedulerProcess,
) -> None:
    say(fresh, request(7, output=(5,), sampling=SamplingParams(max_tokens=1)))
    assert list(fresh.streams.take_messages()) == []
    fresh.group.on_state(b"w", WorkerState("worker.1", num_blocks=NUM_BLOCKS, block_size=4))
    fresh.start_group()
    [(_, message)] = fresh.streams.take_messages()
    assert [one.finish_reason for one in message.opened] == ["length"]


def test_a_request_before_the_first_worker_that_can_not_fit_fails_then(
    fresh: SchedulerProcess, gateway: Gateway
) -> None:
    say(fresh, request(7, prompt=(1,) * (4 * NUM_BLOCKS)))
    fresh.group.on_state(b"w", WorkerState("worker.1", num_blocks=NUM_BLOCKS, block_size=4))
    fresh.start_group()
    assert gateway.results.socket.poll(60_000)
    [(_, failed)] = gateway.results.receive()
    assert (failed.request_id, failed.attempt, failed.error.field) == ("r", 7, "prompt")
    assert not fresh.requests
