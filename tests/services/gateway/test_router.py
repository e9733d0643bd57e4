"""Choice of the replica of a request, and failover from a lost replica."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocol.messages.client import ChatMessage, GenerateRequest
from penstock.protocol.messages.status import SchedulerStatus
from penstock.protocol.transport.channel import MAX_MISSED_HEARTBEATS, Channel
from penstock.services.gateway import router as module
from penstock.services.gateway.request import Request
from penstock.services.gateway.router import MUCH_MORE, PIECE_BYTES, Router, pieces_of
from tests.services.gateway.conftest import accepted

TEXT = "".join(chr(97 + n % 26) for n in range(7 * PIECE_BYTES))


class Sink(Channel[Any]):
    """A scheduler that is sent messages."""

    def __init__(self) -> None:
        pass

    def send(self, *_: object) -> bool:
        return True


def status(replica: int, epoch: int = 1, runs: bool = True, **fields: Any) -> SchedulerStatus:
    return SchedulerStatus(
        epoch=epoch, ready=runs, replica=replica, **{"workers_ready": runs} | fields
    )


def running(number: int, routing: Any = "prefix") -> Router:
    router = Router([Sink()] * number, routing)
    for index in range(number):
        assert router.record_status(status(index))
    return router


def placed(router: Router, request_id: str, prompt: Any = "short", **fields: Any) -> int:
    request = accepted(request_id, prompt=prompt or "x", **fields)
    router.assign(request)
    return request.replica


def sizes(router: Router) -> list[int]:
    return [len(replica.requests) for replica in router._replicas]


def migrated(router: Router, request: Request) -> int | None:
    """Migrate a request. Return its former replica."""
    router.migrate(request)
    return request.migrated_from.pop(request.attempt, None)


def moved(router: Router) -> dict[str, int | None]:
    """Migrate stranded requests: their former replicas by id."""
    return {request.request_id: migrated(router, request) for request in router.stranded()}


# ---- prompts -----------------------------------------------------------------------------------


@given(st.text(max_size=900), st.text(max_size=900), st.text(max_size=900))
@settings(max_examples=50)
def test_prompts_share_the_pieces_of_their_common_beginning(a: str, b: str, c: str) -> None:
    one, other = (pieces_of(GenerateRequest(prompt=a + rest)) for rest in (b, c))
    common = len(a.encode()) // PIECE_BYTES
    assert one[:common] == other[:common]
    assert len(one) == len((a + b).encode()) // PIECE_BYTES
    differ = [x != y for x, y in zip(one, other, strict=False)]
    assert differ == sorted(differ), "what follows a difference is different"


def test_a_longer_conversation_begins_as_the_shorter_one() -> None:
    messages = [ChatMessage(role="user", content=TEXT), ChatMessage(role="assistant", content="b")]
    pieces = pieces_of(GenerateRequest(messages=messages[:1]))
    assert len(pieces) == 7
    assert pieces_of(GenerateRequest(messages=messages * 400))[:7] == pieces
    assert len(pieces_of(GenerateRequest(messages=messages * 400))) == module.MAX_PIECES
    tools = [{"type": "function"}]
    assert pieces_of(GenerateRequest(messages=messages[:1], tools=tools))[0] != pieces[0]
    assert len(pieces_of(GenerateRequest(prompt=[5] * 130))) == 2


# ---- the choice --------------------------------------------------------------------------------


def test_a_prompt_goes_where_most_of_it_has_been() -> None:
    router = running(3)
    homes = []
    for n in range(3):
        router.assign(one := accepted(f"{n}", prompt=f"{n}" * PIECE_BYTES))
        router.unassign(one)
        homes.append(one.replica)
    assert sorted(homes) == [0, 1, 2], "they are equal, and take turns"
    for n, home in enumerate(homes):
        assert placed(router, f"again {n}", f"{n}" * PIECE_BYTES + TEXT) == home
    assert placed(router, "x", "1" * PIECE_BYTES + TEXT + "more") == homes[1]


def test_a_replica_with_much_more_to_do_does_not_get_it_and_then_two_have_it() -> None:
    router = running(2)
    places = [placed(router, f"{n}", TEXT) for n in range(40)]
    most = MUCH_MORE[0]
    assert places[: most + 1] == [places[0]] * (most + 1)
    assert places[most + 1] != places[0]
    assert abs(sizes(router)[0] - sizes(router)[1]) <= 1, "both have the prompt"


def test_what_is_known_is_bounded_and_the_first_pieces_stay_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_KNOWN", 10)
    router = running(2)
    home = placed(router, "a", TEXT)
    placed(router, "b", TEXT[::-1])
    assert len(router._prefixes) == 10
    assert router._prefixes.longest(pieces_of(GenerateRequest(prompt=TEXT)), [0, 1]) == {home}


@pytest.mark.parametrize("routing", ["prefix", "load", "random"])
def test_only_what_runs_gets_requests(routing: str) -> None:
    router = running(3, routing)
    router.record_status(status(1, runs=False))
    places = {placed(router, f"{n}", TEXT * (n % 2)) for n in range(60)}
    assert places == {0, 2}
    if routing == "load":
        assert sizes(router) == [30, 0, 30]


def test_requests_come_before_anything_runs() -> None:
    router = Router([Sink()] * 2, "prefix")
    assert {placed(router, f"{n}") for n in range(4)} == {0, 1}
    assert moved(router) == {}
    router.record_status(status(0))
    assert moved(router) == {}, "nothing is heard of the other one yet"
    router.record_status(status(1, runs=False))
    assert len(moved(router)) == 2
    assert sizes(router) == [4, 0]


# ---- loss --------------------------------------------------------------------------------------


def test_what_a_replica_without_workers_has_goes_on_elsewhere() -> None:
    router = running(2)
    router.assign(first := accepted("a", prompt=TEXT))
    router.record_status(status(first.replica, runs=False, num_deaths={"a": 2}))
    assert moved(router) == {"a": 0}
    assert (first.replica, first.submission().request.num_deaths, sizes(router)) == (1, 2, [0, 1])
    router.record_status(status(1, runs=False))
    assert moved(router) == {}, "nobody runs"
    router.record_status(status(0))
    assert moved(router) == {"a": 1}
    router.record_status(status(1))
    assert placed(router, "b", TEXT) == 0, "the cache of the other one was lost"


def test_who_is_about_to_be_back_is_not_left() -> None:
    """The scheduler has restarted, and its workers have the KV cache of its requests."""
    router = running(2)
    router.assign(first := accepted("a", prompt=TEXT))
    router.record_running({1 - first.replica})
    assert moved(router) == {}
    assert router.record_status(status(0, epoch=2, runs=False, awaits_workers=True))
    assert (moved(router), migrated(router, first)) == ({}, None)
    assert placed(router, "b") == 1, "a new request does not wait"
    router.record_status(status(0, epoch=2))
    assert (moved(router), placed(router, "c", TEXT)) == ({}, 0)


def test_who_does_not_come_back_is_left() -> None:
    for report in ({1}, status(0, epoch=2, runs=False)):
        router = running(2)
        router.assign(accepted("a", prompt=TEXT))
        router.record_running({1})
        router.record_status(status(0, epoch=2, runs=False, awaits_workers=True))
        if isinstance(report, SchedulerStatus):
            router.record_status(report)
        else:
            router.record_running({1})
        assert moved(router) == {"a": 0}


def test_a_detokenizer_that_is_gone_is_no_reason_to_leave() -> None:
    router = running(2)
    router.assign(accepted("a"))
    router.record_status(SchedulerStatus(epoch=1, ready=False, workers_ready=True))
    assert (router.is_ready, moved(router)) == (False, {})


def test_who_is_silent_is_left_and_heard_again() -> None:
    router = running(2)
    router.assign(first := accepted("a"))
    for _ in range(MAX_MISSED_HEARTBEATS):
        router.on_heartbeat()
        assert moved(router) == {}
        router.record_status(status(1 - first.replica))
    router.on_heartbeat()
    assert not router.covers_all({first.replica})
    assert router.covers_all({1 - first.replica})
    assert list(moved(router)) == ["a"]
    router.record_status(status(0))
    assert placed(router, "b") == 0


def test_reports_that_count_for_nothing() -> None:
    router = running(2)
    assert router.record_status(status(2)) is None
    assert router.record_status(status(1, epoch=0, runs=False)) is None
    assert router.record_status(status(1)) is False
    assert router.record_status(status(1, epoch=2)) is True
    assert router.is_ready


def test_one_replica_is_never_left() -> None:
    router = running(1)
    router.assign(one := accepted("a"))
    for report in (status(0, runs=False), status(0, epoch=2, runs=False), status(0, epoch=2)):
        router.record_status(report)
        assert moved(router) == {}
        assert migrated(router, one) is None
    for _ in range(2 * MAX_MISSED_HEARTBEATS):
        router.on_heartbeat()
    assert moved(router) == {}


@pytest.mark.parametrize("seed", range(20))
def test_every_open_request_has_one_replica(seed: int) -> None:
    """Whatever comes and goes."""
    draw = Random(seed)
    router, open_, epochs = Router([Sink()] * 3, "prefix"), {}, [1, 1, 1]
    acts: list[Callable[[int], Any]] = [
        lambda n: open_.setdefault(f"{n}", accepted(f"{n}", prompt=TEXT[: n * 99] or "x")),
        lambda _: open_ and router.unassign(open_.pop(draw.choice(list(open_)))),
        lambda n: router.record_status(status(n % 3, epochs[n % 3], draw.random() < 0.7)),
        lambda _: router.on_heartbeat(),
    ]
    for number in range(300):
        before = set(open_)
        draw.choice(acts)(number)
        for new in set(open_) - before:
            router.assign(open_[new])
        moved(router)
        held = [(i, replica.index) for replica in router._replicas for i in replica.requests]
        assert dict(held) == {i: request.replica for i, request in open_.items()}
        assert len(held) == len(open_)
        if any(replica.runs for replica in router._replicas):
            assert not any(replica.is_down and replica.requests for replica in router._replicas)


# ---- readiness ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("first_attempt", "is_ready"), [(0, True), (7, True), (8, False)])
def test_a_scheduler_of_a_later_gateway_serves_nobody_here(
    first_attempt: int, is_ready: bool
) -> None:
    router = running(1)
    router.announce_gateway(0, 7)
    router.record_status(status(0, first_attempt=first_attempt))
    assert router.is_ready == is_ready
    assert [status.ready for status in router.statuses] == [is_ready]


def test_an_old_report_is_not_ready() -> None:
    router = running(2)
    for _ in range(MAX_MISSED_HEARTBEATS + 1):
        router.on_heartbeat()
        router.record_status(status(1))
    assert [status.ready for status in router.statuses] == [False, True]
