"""A new gateway at the scheduler's process: resubmitted requests continue, others end."""

from typing import Any

from penstock.protocol.messages.pipeline import GatewayStarted, ReleaseRequest
from penstock.protocol.messages.sampling import SamplingParams
from penstock.protocol.messages.worker import WorkerState
from penstock.protocol.transport.channel import Channel
from penstock.services.scheduler.process import Lease, SchedulerProcess
from penstock.services.scheduler.sequence import Status
from tests.services.scheduler.processes import NUM_BLOCKS, Gateway, opened, request, say, step


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
