"""Work that kills tokenizers is found, and given up; other work is done."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocol.messages.client import AbortRequest, GenerateRequest, TokenizePromptRequest
from penstock.protocol.messages.pipeline import Goodbye, Heartbeat, TokenizeDone, ToTokenizer
from penstock.protocol.transport.channel import MAX_MISSED_HEARTBEATS, Channel
from penstock.protocol.transport.process import Identity
from penstock.services.gateway.poison import MAX_DEATHS, TokenizerPoison
from penstock.services.gateway.request import Share
from penstock.services.gateway.tokenizers import MAX_SILENT, Tokenizers
from tests.services.gateway.conftest import GatewayHarness

Start = Callable[..., GatewayHarness]


class Reports:
    """Reports that the supervisor receives."""

    def __init__(self) -> None:
        self.died_with: list[tuple[list[tuple[str, int]], int]] = []
        self.num_found = 0
        self.num_cleared = 0

    def clear(self, digests: list[bytes]) -> None:
        self.num_cleared += len(digests)

    def died(self, processes: list[tuple[str, int]], suspects: list[bytes]) -> None:
        self.died_with.append((processes, len(suspects)))

    def found(self, _digest: bytes) -> None:
        self.num_found += 1


# ---- at the gateway ----------------------------------------------------------------------------


class Successors:
    """Incarnations of one tokenizer; the one before is dead when the next one is heard."""

    def __init__(self, harness: GatewayHarness) -> None:
        self.harness = harness
        self.reports = harness.gateway.default.failures.poison._reports = Reports()  # type: ignore[assignment]
        self.number = 0
        self.channel: Channel[Any]

    def start(self, name: str = "tokenizer.1") -> bytes:
        self.number += 1
        identity = Identity(name, 100 + self.number, self.number).encode()
        where = self.harness.gateway.default.to_tokenizers.last_endpoint.decode()
        self.channel = self.harness.context.connect(zmq.DEALER, where, ToTokenizer, identity)
        self.channel.send(Heartbeat(name))
        peers = self.harness.gateway.default.tokenizers.peers
        self.harness.run_until(lambda: peers.get(identity) and len(peers) == 1)
        return identity

    def given(self) -> list[str]:
        """Return the work that the tokenizer has now."""
        [peer] = self.harness.gateway.default.tokenizers.peers
        return [work.message.prompt for work in peer.work.values()]  # type: ignore[misc, union-attr]

    def tokenize(self) -> None:
        """Do the first of it."""
        [peer] = self.harness.gateway.default.tokenizers.peers
        key = request_id, attempt = next(iter(peer.work))  # type: ignore[misc]
        self.channel.send(TokenizeDone(request_id, attempt, 3))
        self.harness.run_until(lambda: key not in peer.work)


@pytest.fixture
def successors(start_gateway: Start) -> Successors:
    return Successors(start_gateway())


def test_what_is_alone_at_two_deaths_is_given_up(successors: Successors) -> None:
    harness = successors.harness
    client = harness.connect()
    successors.start()
    for name in ("before", "poison", "after"):
        harness.submit(client, name, prompt=name)
    successors.tokenize()
    harness.send_tokens("before", 0, 1)
    assert successors.given() == ["poison", "after"]
    for _ in range(MAX_DEATHS):
        successors.start()
        assert successors.given() == ["poison"], "alone"
    harness.submit(client, "late", prompt="late")
    successors.start()
    failed = harness.receive_reply(client)
    assert (failed.request_id, failed.code) == ("poison", "failed")
    assert "2 tokenizers died while they worked at the request" in failed.message
    assert successors.given() == ["after"], "a suspect, too"
    successors.tokenize()
    assert successors.given() == ["late"]
    successors.tokenize()
    assert set(harness.gateway.ledger._requests) == {"before", "after", "late"}
    assert successors.reports.num_found == 1
    assert successors.reports.num_cleared == 1, "what was tokenized after the deaths"
    assert successors.reports.died_with == [
        ([("tokenizer.1", 101)], 2),
        ([("tokenizer.1", 102)], 1),
        ([("tokenizer.1", 103)], 1),
    ]
    harness.send(client, GenerateRequest(prompt="poison", seed=1))
    assert "it is not tried again" in harness.receive_reply(client).message


def test_a_question_is_given_up_likewise(successors: Successors) -> None:
    harness = successors.harness
    client = harness.connect()
    successors.start()
    harness.send(client, TokenizePromptRequest(prompt="poison"))
    harness.run_until(lambda: successors.given())
    for _ in range(MAX_DEATHS):
        successors.start()
    assert harness.receive_reply(client).code == "failed"
    assert harness.is_empty()
    harness.send(client, TokenizePromptRequest(prompt="poison"))
    assert "it is not tried again" in harness.receive_reply(client).message


def test_who_was_alone_once_and_is_done_begins_at_none(successors: Successors) -> None:
    harness = successors.harness
    client = harness.connect()
    successors.start()
    for number in range(3):
        harness.submit(client, f"r{number}", prompt="same")
        successors.start()
        assert (
            harness.gateway.default.failures.poison.num_deaths(
                harness.gateway.ledger._requests[f"r{number}"].message
            )
            == 1
        )
        successors.tokenize()
        harness.send_tokens(f"r{number}", 0, 1)
    assert set(harness.gateway.ledger._requests) == {"r0", "r1", "r2"}


def test_who_leaves_and_asks_again_is_as_suspect_as_before(successors: Successors) -> None:
    harness = successors.harness
    successors.start()
    for number in range(MAX_DEATHS):
        client = harness.connect()
        harness.submit(client, f"r{number}", prompt="poison")
        if number < MAX_DEATHS - 1:
            harness.send(client, AbortRequest(request_id=f"r{number}"))
            harness.receive_reply(client)
            assert harness.receive_reply(client).found
        successors.start()
    assert harness.receive_reply(client).code == "failed"


def fall_silent(successors: Successors) -> None:
    tokenizers = successors.harness.gateway.default.tokenizers
    for _ in range(MAX_MISSED_HEARTBEATS + 1):
        tokenizers.lose_silent()
    assert not len(tokenizers.peers)


def test_silence_of_a_busy_tokenizer_is_no_death(successors: Successors) -> None:
    """The tokenizer sends again after a call that held the interpreter's lock."""
    harness = successors.harness
    client = harness.connect()
    identity = successors.start()
    harness.submit(client, "a", prompt="a")
    for _ in range(2 * MAX_DEATHS):
        fall_silent(successors)
        successors.channel.send(Heartbeat("tokenizer.1"))
        harness.run_until(lambda: harness.gateway.default.tokenizers.peers.get(identity))
        assert successors.given() == ["a"]
    assert successors.reports.died_with == []
    successors.tokenize()


def test_a_tokenizer_that_fell_silent_has_died_when_its_successor_registers(
    successors: Successors,
) -> None:
    harness = successors.harness
    client = harness.connect()
    successors.start()
    harness.submit(client, "a", prompt="poison")
    for _ in range(MAX_DEATHS):
        fall_silent(successors)
        successors.start()
    assert harness.receive_reply(client).code == "failed"
    assert [digests for _, digests in successors.reports.died_with] == [1] * MAX_DEATHS


def test_few_tokenizers_without_a_successor_are_remembered(start_gateway: Start) -> None:
    """Each was killed and scaled down while it had work; the last one passes the work on."""
    successors = Successors(harness := start_gateway())
    tokenizers = harness.gateway.default.tokenizers
    harness.submit(harness.connect(), "a", prompt="a")
    for number in range(2 * MAX_SILENT):
        successors.start(f"tokenizer.{number}")
        fall_silent(successors)
        assert 0 < len(tokenizers._silent) <= MAX_SILENT
    successors.start("tokenizer.last")
    successors.tokenize()
    assert not tokenizers._silent


def test_a_goodbye_is_no_death(successors: Successors) -> None:
    harness = successors.harness
    harness.submit(harness.connect(), "a", prompt="a")
    for _ in range(2 * MAX_DEATHS):
        successors.start()
        successors.channel.send(Goodbye())
        harness.run_until(lambda: not len(harness.gateway.default.tokenizers.peers))
    successors.start()
    assert successors.given() == ["a"]
    assert successors.reports.died_with == []


# ---- in any order ------------------------------------------------------------------------------


class Job:
    """A piece of work."""

    size = 1000
    is_open = True

    def __init__(self, key: int) -> None:
        self.key = key
        self.message = GenerateRequest(prompt=[key])
        self.share = Share("")
        self.turn = ""
        self.priority = 0

    def submission(self) -> Any:
        return self.key


class Wire:
    """Tokenizers that work in order, and die at poison; everything is sent."""

    def __init__(self) -> None:
        self.queues: dict[bytes, list[int]] = {}

    def send(self, key: int, to: bytes) -> bool:
        self.queues[to].append(key)
        return True


@given(
    number=st.integers(1, 4),
    is_poison=st.lists(st.sampled_from([False, False, False, True]), min_size=1, max_size=30),
    random=st.randoms(use_true_random=False),
)
@settings(max_examples=200)
def test_all_poison_is_found_and_nothing_else(
    number: int, is_poison: list[bool], random: Random
) -> None:
    wire, given_up, done = Wire(), [], []
    tokenizers = Tokenizers(
        wire,  # type: ignore[arg-type]
        TokenizerPoison(Reports()),  # type: ignore[arg-type]
        on_lost=lambda _: None,
        on_poison=lambda job: given_up.append(job.key),
        on_defect=lambda _: None,
    )
    names = 0

    def start() -> None:
        nonlocal names
        names += 1
        identity = b"t%d" % names
        wire.queues[identity] = []
        tokenizers.alive(identity, "t")

    for _ in range(number):
        start()
    jobs = [Job(key) for key in range(len(is_poison))]
    while jobs or any(wire.queues.values()):
        busy = [identity for identity, queue in wire.queues.items() if queue]
        if jobs and (not busy or random.random() < 0.5):
            tokenizers.submit(jobs.pop(0))  # type: ignore[arg-type]
            continue
        identity = random.choice(busy)
        key = wire.queues[identity].pop(0)
        if is_poison[key]:
            del wire.queues[identity]
            tokenizers.lose(identity)
            start()
        else:
            done.append(key)
            tokenizers.done(identity, key)
    assert sorted(given_up) == [key for key, bad in enumerate(is_poison) if bad]
    assert sorted(done) == [key for key, bad in enumerate(is_poison) if not bad]
    assert names - number <= 3 * len(given_up)
