"""Which replica gets a request, and what becomes of those of a replica that is lost."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocol.messages.client import JSON, ChatMessage, GenerateRequest
from penstock.protocol.messages.status import SchedulerStatus
from penstock.protocol.transport.channel import MAX_MISSED_HEARTBEATS
from penstock.services.gateway import router as module
from penstock.services.gateway.connections import Client, Connection
from penstock.services.gateway.entry import Entry
from penstock.services.gateway.router import MUCH_MORE, PIECE_BYTES, Replicas, pieces_of

TEXT = "".join(chr(97 + n % 26) for n in range(7 * PIECE_BYTES))


def entry(request_id: str, prompt: Any = "short", **fields: Any) -> Entry:
    request = GenerateRequest(prompt=prompt, **fields)
    return Entry(request, request_id, Client((b"c",), JSON, Connection()))


def status(replica: int, epoch: int = 1, runs: bool = True, **fields: Any) -> SchedulerStatus:
    return SchedulerStatus(
        epoch=epoch, ready=runs, replica=replica, **{"workers_ready": runs} | fields
    )


def running(number: int, routing: Any = "prefix") -> Replicas:
    replicas = Replicas(number, routing)
    for index in range(number):
        assert replicas.heard(status(index))
    return replicas


def placed(replicas: Replicas, request_id: str, prompt: Any = "short", **fields: Any) -> int:
    one = entry(request_id, prompt, **fields)
    replicas.place(one)
    return one.replica


def sizes(replicas: Replicas) -> list[int]:
    return [len(one.entries) for one in replicas._all]


def moved(replicas: Replicas) -> dict[str, int | None]:
    """What is lost goes on elsewhere: where it was, by id."""
    return {one.request_id: replicas.place_again(one) for one in replicas.lost()}


# ---- prompts -----------------------------------------------------------------------------------


@given(st.text(max_size=900), st.text(max_size=900), st.text(max_size=900))
@settings(max_examples=50, deadline=None)
def test_prompts_share_the_pieces_of_their_common_beginning(a: str, b: str, c: str) -> None:
    one, other = (pieces_of(GenerateRequest(prompt=a + rest)) for rest in (b, c))
    common = len(a.encode()) // PIECE_BYTES
    assert one[:common] == other[:common]
    assert len(one) == len((a + b).encode()) // PIECE_BYTES
    differ = [x != y for x, y in zip(one, other, strict=False)]
    assert differ == sorted(differ), "what is behind a difference is different"


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
    replicas = running(3)
    homes = []
    for n in range(3):
        replicas.place(one := entry(f"{n}", f"{n}" * PIECE_BYTES))
        replicas.end(one)
        homes.append(one.replica)
    assert sorted(homes) == [0, 1, 2], "they are equal, and take turns"
    for n, home in enumerate(homes):
        assert placed(replicas, f"again {n}", f"{n}" * PIECE_BYTES + TEXT) == home
    assert placed(replicas, "x", "1" * PIECE_BYTES + TEXT + "more") == homes[1]


def test_a_replica_with_much_more_to_do_does_not_get_it_and_then_two_have_it() -> None:
    replicas = running(2)
    places = [placed(replicas, f"{n}", TEXT) for n in range(40)]
    most = MUCH_MORE[0]
    assert places[: most + 1] == [places[0]] * (most + 1)
    assert places[most + 1] != places[0]
    assert abs(sizes(replicas)[0] - sizes(replicas)[1]) <= 1, "both have the prompt"


def test_what_is_known_is_bounded_and_the_first_pieces_stay_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_KNOWN", 10)
    replicas = running(2)
    home = placed(replicas, "a", TEXT)
    placed(replicas, "b", TEXT[::-1])
    assert len(replicas._prefixes) == 10
    assert replicas._prefixes.longest(pieces_of(GenerateRequest(prompt=TEXT)), [0, 1]) == {home}


@pytest.mark.parametrize("routing", ["prefix", "load", "random"])
def test_only_what_runs_gets_requests(routing: str) -> None:
    replicas = running(3, routing)
    replicas.heard(status(1, runs=False))
    places = {placed(replicas, f"{n}", TEXT * (n % 2)) for n in range(60)}
    assert places == {0, 2}
    if routing == "load":
        assert sizes(replicas) == [30, 0, 30]


def test_requests_come_before_anything_runs() -> None:
    replicas = Replicas(2, "prefix")
    assert {placed(replicas, f"{n}") for n in range(4)} == {0, 1}
    assert moved(replicas) == {}
    replicas.heard(status(0))
    assert moved(replicas) == {}, "nothing is heard of the other one yet"
    replicas.heard(status(1, runs=False))
    assert len(moved(replicas)) == 2
    assert sizes(replicas) == [4, 0]


# ---- loss --------------------------------------------------------------------------------------


def test_what_a_replica_without_workers_has_goes_on_elsewhere() -> None:
    replicas = running(2)
    replicas.place(first := entry("a", TEXT))
    replicas.heard(status(first.replica, runs=False, num_deaths={"a": 2}))
    assert moved(replicas) == {"a": 0}
    assert (first.replica, first.submission().num_deaths, sizes(replicas)) == (1, 2, [0, 1])
    replicas.heard(status(1, runs=False))
    assert moved(replicas) == {}, "nobody runs"
    replicas.heard(status(0))
    assert moved(replicas) == {"a": 1}
    replicas.heard(status(1))
    assert placed(replicas, "b", TEXT) == 0, "the cache of the other one was lost"


def test_a_detokenizer_that_is_gone_is_no_reason_to_leave() -> None:
    replicas = running(2)
    replicas.place(entry("a"))
    replicas.heard(SchedulerStatus(epoch=1, ready=False, workers_ready=True))
    assert (replicas.ready, moved(replicas)) == (False, {})


def test_who_is_silent_is_left_and_heard_again() -> None:
    replicas = running(2)
    replicas.place(first := entry("a"))
    for _ in range(MAX_MISSED_HEARTBEATS):
        replicas.on_heartbeat()
        assert moved(replicas) == {}
        replicas.heard(status(1 - first.replica))
    replicas.on_heartbeat()
    assert not replicas.are_all({first.replica})
    assert replicas.are_all({1 - first.replica})
    assert list(moved(replicas)) == ["a"]
    replicas.heard(status(0))
    assert placed(replicas, "b") == 0


def test_reports_that_count_for_nothing() -> None:
    replicas = running(2)
    assert replicas.heard(status(2)) is None
    assert replicas.heard(status(1, epoch=0, runs=False)) is None
    assert replicas.heard(status(1)) is False
    assert replicas.heard(status(1, epoch=2)) is True
    assert replicas.ready


def test_one_replica_is_never_left() -> None:
    replicas = running(1)
    replicas.place(one := entry("a"))
    for report in (status(0, runs=False), status(0, epoch=2, runs=False), status(0, epoch=2)):
        replicas.heard(report)
        assert moved(replicas) == {}
        assert replicas.place_again(one) is None
    for _ in range(2 * MAX_MISSED_HEARTBEATS):
        replicas.on_heartbeat()
    assert moved(replicas) == {}


@pytest.mark.parametrize("seed", range(20))
def test_every_open_request_has_one_replica(seed: int) -> None:
    """Whatever comes and goes."""
    draw = Random(seed)
    replicas, open_, epochs = Replicas(3, "prefix"), {}, [1, 1, 1]
    acts: list[Callable[[int], Any]] = [
        lambda n: open_.setdefault(f"{n}", entry(f"{n}", TEXT[: n * 99])),
        lambda _: open_ and replicas.end(open_.pop(draw.choice(list(open_)))),
        lambda n: replicas.heard(status(n % 3, epochs[n % 3], draw.random() < 0.7)),
        lambda _: replicas.on_heartbeat(),
    ]
    for number in range(300):
        before = set(open_)
        draw.choice(acts)(number)
        for new in set(open_) - before:
            replicas.place(open_[new])
        moved(replicas)
        held = [(i, one.index) for one in replicas._all for i in one.entries]
        assert dict(held) == {i: one.replica for i, one in open_.items()}
        assert len(held) == len(open_)
        if any(one.runs for one in replicas._all):
            assert not any(one.is_down and one.entries for one in replicas._all)


# ---- readiness ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("first_attempt", "is_ready"), [(0, True), (7, True), (8, False)])
def test_a_scheduler_of_a_later_gateway_serves_nobody_here(
    first_attempt: int, is_ready: bool
) -> None:
    replicas = running(1)
    replicas.introduced(0, 7)
    replicas.heard(status(0, first_attempt=first_attempt))
    assert replicas.ready == is_ready
    assert [one.ready for one in replicas.statuses] == [is_ready]


def test_an_old_report_is_not_ready() -> None:
    replicas = running(2)
    for _ in range(MAX_MISSED_HEARTBEATS + 1):
        replicas.on_heartbeat()
        replicas.heard(status(1))
    assert [one.ready for one in replicas.statuses] == [False, True]
