"""A silent detokenizer has not died: the registration of its successor shows a death."""

from typing import Any

import pytest

from penstock.protocol.messages.pipeline import Heartbeat
from penstock.protocol.poison import MAX_DEATHS
from penstock.protocol.transport.channel import MAX_MISSED_HEARTBEATS, Channel
from penstock.protocol.transport.peers import MAX_SILENT
from penstock.protocol.transport.process import Identity
from penstock.services.scheduler.poison import SequencePoison
from penstock.services.scheduler.process import SchedulerProcess
from tests.services.scheduler.desk import Reader
from tests.services.scheduler.peers.test_trials import Hall, started
from tests.services.scheduler.processes import Gateway, Reports, opened, request, step


def test_a_stopped_detokenizer_costs_no_request(
    process: SchedulerProcess, gateway: Gateway, detokenizer: Channel[Any]
) -> None:
    """Stopped and continued with the same stream, again and again."""
    reports = Reports()
    process.poison = SequencePoison(reports)  # type: ignore[arg-type]
    process.accept(request(1, "r"))
    step(process)
    assert [one.request_id for one in opened(process)] == ["r"]
    for _ in range(3 * MAX_DEATHS):
        for _ in range(MAX_MISSED_HEARTBEATS + 1):
            process.on_heartbeat()
        assert not len(process.streams.detokenizers)
        detokenizer.send(Heartbeat("detokenizer.1"))
        assert process.detokenizers.socket.poll(60_000)
        process.schedule = lambda: None  # type: ignore[method-assign]
        process.on_detokenizers()
        del process.schedule
        assert [one.request_id for one in opened(process)] == ["r"]
        process.streams.confirmed(b"d")
    assert gateway.failures(process) == []
    assert reports.died_with == []
    assert set(process.requests) == {"r"}


class Silence(Hall):
    """Readers of a name that hang, without a message, at the streams of `poison`."""

    def start(self) -> None:
        self.num_readers += 1
        identity = self.identity
        self.streams.alive(identity, "d")
        self.readers[identity] = Reader()
        for dead in self.streams.predecessors(identity):
            self.blame(dead)

    @property
    def identity(self) -> bytes:
        return Identity("d", 1, self.num_readers).encode()

    def blame(self, dead: bytes) -> None:
        for sequence in self.streams.lost(dead, has_died=True)[1]:
            self.given_up.append(sequence.request_id)
            self.streams.close(sequence)

    def fall_silent(self) -> None:
        for _ in range(MAX_MISSED_HEARTBEATS + 1):
            self.streams.lose_silent()
        assert not len(self.streams.detokenizers)

    def die(self, identity: bytes) -> None:
        """Let a reader hang, which is killed for it."""
        self.num_deaths += 1
        del self.readers[identity]
        self.fall_silent()
        self.start()


@pytest.mark.parametrize("number", [1, 3, 80])
def test_poison_that_hangs_detokenizers_is_given_up(number: int) -> None:
    hall = Silence()
    sequences = started(hall, number)
    hall.poison = {"r0"}
    hall.die(hall.identity)
    hall.step(sequences, 2)
    hall.settle()
    assert hall.given_up == ["r0"]
    hall.step(sequences[1:], 3)
    hall.settle()
    assert [hall.tokens_of(one) for one in sequences[1:]] == [[1, 2, 3]] * (number - 1)
    assert not hall.streams._trials.suspects
    assert not hall.streams.detokenizers.remembered


def test_streams_are_tried_where_they_are_open_since() -> None:
    """Another detokenizer has them; none is there twice, and a closed one is not tried."""
    hall = Silence()
    sequences = started(hall, 4)
    first = hall.identity
    hall.fall_silent()
    hall.come("other")
    hall.step(sequences, 2)
    hall.settle()
    hall.streams.close(closed := sequences.pop())
    assert closed.stream_id
    del hall.readers[first]
    hall.start()
    hall.step(sequences, 3)
    hall.settle()
    assert [hall.tokens_of(one) for one in sequences] == [[1, 2, 3]] * 3
    assert sum(hall.loads) == 3
    assert hall.given_up == []


def test_few_detokenizers_without_a_successor_are_remembered() -> None:
    hall = Hall(0)
    for number in range(2 * MAX_SILENT):
        hall.come(f"d{number}")
        for _ in range(MAX_MISSED_HEARTBEATS + 1):
            hall.streams.lose_silent()
    assert len(hall.streams.detokenizers.remembered) == MAX_SILENT
