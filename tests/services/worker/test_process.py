"""The worker's talk with the scheduler, with a runner that computes nothing."""

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from penstock.protocol.config import Config
from penstock.protocol.logprobs import PackedLogprobs
from penstock.protocol.messages import FromWorker, WorkerAssignment, WorkerExit, WorkerHello
from penstock.protocol.plan import BatchPlan, SampledTokens, pack
from penstock.protocol.sockets import bind
from penstock.services.worker.process import Worker, WorkerError
from penstock.services.worker.told import Told
from tests.services.worker.plans import plan

TIMEOUT = 10_000
"""milliseconds that a message may take"""


LOGPROBS = PackedLogprobs(pack([5]), b"1234")
TOLD = Told([(1, LOGPROBS)], [(3, [LOGPROBS, LOGPROBS])], [(0, "too long")])


class FakeStep:
    """A step whose tokens are its epoch and number; done when the test says so."""

    def __init__(self, step_plan: BatchPlan, done: bool, on_wait: Callable[[int], None]) -> None:
        self._token_ids = [step_plan.epoch, step_plan.step]
        self._done = done
        self._on_wait = on_wait

    def done(self) -> bool:
        return self._done

    def token_ids(self) -> list[int]:
        self._done = True
        self._on_wait(self._token_ids[1])
        return self._token_ids

    def told(self) -> Told:
        return TOLD


class FakeRunner:
    """Keeps what it is told to do."""

    num_blocks = 5
    block_size = 16

    def __init__(self) -> None:
        self.launched: list[BatchPlan] = []
        self.steps_are_done = True
        self.on_launch: Callable[[int], None] = lambda _: None
        self.on_wait: Callable[[int], None] = lambda _: None
        self.num_clears = 0

    def launch(self, step_plan: BatchPlan) -> FakeStep:
        self.launched.append(step_plan)
        self.on_launch(step_plan.step)
        return FakeStep(step_plan, self.steps_are_done, self.on_wait)

    def clear(self) -> None:
        self.num_clears += 1

    def idle_us(self) -> tuple[float, float]:
        return 3.0, 4.0


class Talk:
    """A worker, and the scheduler's end of its socket."""

    def __init__(
        self, context: "zmq.Context[Any]", folder: Path, num_plans_in_flight: int = 2
    ) -> None:
        self.context = context
        endpoint = f"ipc://{folder}/workers"
        self.scheduler = bind(self.context, zmq.ROUTER, endpoint, FromWorker)
        process = SimpleNamespace(
            config=Config(num_plans_in_flight=num_plans_in_flight),
            name="worker.1",
            node_id="node-a",
            started=17,
            host="127.0.0.1",
            identity=b"worker.1/7",
            context=self.context,
            endpoints=SimpleNamespace(workers=endpoint),
            log=logging.getLogger("worker"),
        )
        self.runner = FakeRunner()
        self.num_loads = 0
        self.num_progress_calls = 0
        self.worker = Worker(process, self._load)  # type: ignore[arg-type]
        self.worker.say_hello()
        self.answer()

    def _load(
        self, _config: Config, _assignment: WorkerAssignment, on_progress: Callable[[], None]
    ) -> FakeRunner:
        for _ in range(self.num_progress_calls):
            on_progress()
        self.num_loads += 1
        return self.runner

    def tell(self, *messages: object) -> None:
        """Sends to the worker, which handles it all."""
        for message in messages:
            self.tell_bytes(self.scheduler.encode(message))

    def tell_bytes(self, frame: bytes) -> None:
        """Sends what need not be a message."""
        self.bring_bytes(frame)
        self.worker.receive()

    def bring(self, message: object) -> None:
        """Sends a message that then waits at the worker's socket."""
        self.bring_bytes(self.scheduler.encode(message))

    def bring_bytes(self, frame: bytes) -> None:
        """As `bring`."""
        assert self.scheduler.send_bytes(frame, b"worker.1/7")
        assert self.worker.channel.socket.poll(TIMEOUT)

    def answer(self) -> WorkerHello | SampledTokens:
        """The worker's next message."""
        assert self.scheduler.socket.poll(TIMEOUT)
        identity, frame = self.scheduler.socket.recv_multipart()
        message: WorkerHello | SampledTokens = self.scheduler.decode([identity, frame])
        return message

    def says_nothing_more(self) -> bool:
        """Whether a hello sent now is the next that comes."""
        self.worker.say_hello()
        return isinstance(self.answer(), WorkerHello)


def hello(*fields: Any) -> WorkerHello:
    return WorkerHello(*fields, pid=os.getpid(), node="node-a", started=17)


def assignment(epoch: int = 1, group: str = "g", rank: int = 0) -> WorkerAssignment:
    return WorkerAssignment(epoch, group, rank, 2, "tcp://127.0.0.1:1")


def tokens_of(epoch: int, step: int) -> SampledTokens:
    """What the worker sends when its runner has done a step."""
    return SampledTokens(epoch, step, pack([epoch, step]), *TOLD)


@pytest.fixture
def context() -> "Iterator[zmq.Context[Any]]":
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def talk(context: "zmq.Context[Any]", tmp_path: Path) -> Talk:
    return Talk(context, tmp_path)


@pytest.fixture
def seated(talk: Talk) -> Talk:
    """A worker of rank 0 in group g, of epoch 1."""
    talk.tell(assignment())
    talk.answer()
    return talk


def test_says_who_it_is_and_then_what_it_holds(talk: Talk) -> None:
    talk.worker.say_hello()
    first = talk.answer()
    assert isinstance(first, WorkerHello)
    assert first.rendezvous.startswith("tcp://127.0.0.1:")
    first.rendezvous = ""
    assert first == hello("worker.1")
    talk.tell(assignment(rank=1))
    assert talk.answer() == hello("worker.1", "g", 1, 5, 16, (3.0, 4.0))
    talk.worker.say_hello()
    assert talk.answer() == hello("worker.1", "g", 1, 5, 16, (3.0, 4.0))


def test_says_hello_while_it_loads(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.services.worker.process.HEARTBEAT_INTERVAL", 0.0)
    talk.num_progress_calls = 2
    talk.tell(assignment())
    assert talk.answer() == hello("worker.1", "g", 0, 0)
    assert talk.answer() == hello("worker.1", "g", 0, 0)
    assert talk.answer() == hello("worker.1", "g", 0, 5, 16, (3.0, 4.0))


def test_every_plan_is_answered_with_its_tokens(seated: Talk) -> None:
    for number in range(3):
        seated.tell(plan(number))
        assert seated.answer() == tokens_of(1, number)
    assert [step_plan.step for step_plan in seated.runner.launched] == [0, 1, 2]


def test_a_running_step_is_waited_for_when_the_next_is_launched(seated: Talk) -> None:
    seated.runner.steps_are_done = False
    seated.tell(plan(0))
    assert seated.says_nothing_more()
    seated.tell(plan(1))
    assert seated.answer() == tokens_of(1, 0)
    assert seated.says_nothing_more()
    seated.runner.steps_are_done = True
    seated.tell(plan(2))
    assert seated.answer() == tokens_of(1, 1)
    assert seated.answer() == tokens_of(1, 2)


def test_a_plan_that_has_come_is_launched_before_another_step_is_waited_for(seated: Talk) -> None:
    seated.runner.steps_are_done = False
    seated.runner.on_launch = lambda number: seated.bring(plan(number + 1)) if number < 2 else None
    seated.runner.on_wait = lambda number: seated.bring(plan(3)) if number == 0 else None
    seated.tell(plan(0))
    assert [one.step for one in seated.runner.launched] == [0, 1, 2]
    assert seated.answer() == tokens_of(1, 0)
    assert seated.says_nothing_more()
    seated.worker.receive()
    assert len(seated.runner.launched) == 4
    assert [seated.answer(), seated.answer()] == [tokens_of(1, 1), tokens_of(1, 2)]
    assert seated.says_nothing_more()


def test_with_one_plan_in_flight_every_step_is_waited_for(
    context: "zmq.Context[Any]", tmp_path: Path
) -> None:
    talk = Talk(context, tmp_path, num_plans_in_flight=1)
    talk.tell(assignment())
    talk.answer()
    talk.runner.steps_are_done = False
    talk.tell(plan(0))
    assert talk.answer() == tokens_of(1, 0)


def test_only_rank_0_sends_tokens(talk: Talk) -> None:
    talk.tell(assignment(rank=1))
    talk.answer()
    talk.tell(plan(0), plan(1))
    assert len(talk.runner.launched) == 2
    assert talk.says_nothing_more()


def test_says_hello_no_oftener_than_need_be(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.services.worker.process.HEARTBEAT_INTERVAL", 3600.0)
    talk.num_progress_calls = 2
    talk.tell(assignment())
    assert talk.answer() == hello("worker.1", "g", 0, 5, 16, (3.0, 4.0))


def test_a_new_epoch_keeps_the_model_and_drops_the_batch(seated: Talk) -> None:
    seated.runner.steps_are_done = False
    seated.tell(plan(0), assignment(epoch=2))
    assert seated.runner.num_clears == 2
    assert seated.num_loads == 1
    seated.runner.steps_are_done = True
    seated.tell(plan(1, epoch=1), plan(0, epoch=2))
    assert seated.answer() == tokens_of(2, 0)
    assert seated.says_nothing_more()
    assert [(p.epoch, p.step) for p in seated.runner.launched] == [(1, 0), (2, 0)]


def test_an_assignment_said_again_changes_nothing(seated: Talk) -> None:
    seated.tell(plan(0), assignment(), assignment(epoch=0, group="old"), plan(1))
    assert seated.runner.num_clears == 1
    assert seated.answer() == tokens_of(1, 0)
    assert seated.answer() == tokens_of(1, 1)


def test_a_gap_ends_the_worker(seated: Talk) -> None:
    seated.tell(plan(0))
    with pytest.raises(WorkerError, match="got plan 2; plan 1 comes next"):
        seated.tell(plan(2))
    with pytest.raises(WorkerError, match="got plan 0; plan 1 comes next"):
        seated.tell(plan(0))


def test_a_plan_of_another_epoch_ends_the_worker(talk: Talk) -> None:
    with pytest.raises(WorkerError, match="got a plan of epoch 4; its own is -1"):
        talk.tell(plan(0, epoch=4))
    talk.tell(assignment(epoch=4))
    with pytest.raises(WorkerError, match="got a plan of epoch 5; its own is 4"):
        talk.tell(plan(0, epoch=5))


def test_another_place_ends_the_worker(seated: Talk) -> None:
    with pytest.raises(WorkerError, match="rank 0 of group g can't become rank 0 of group h"):
        seated.tell(assignment(epoch=2, group="h"))
    with pytest.raises(WorkerError, match="can't become rank 1 of group g"):
        seated.tell(assignment(rank=1))


def test_a_word_of_the_scheduler_ends_the_worker(seated: Talk) -> None:
    with pytest.raises(WorkerError, match=r"leaves: worker\.2 is gone"):
        seated.tell(WorkerExit("worker.2 is gone"))


def test_a_frame_that_is_no_message_is_dropped(seated: Talk) -> None:
    seated.tell_bytes(b"\xc1")
    seated.tell(plan(0))
    assert seated.answer() == tokens_of(1, 0)
    assert seated.worker.channel.num_bad_frames == 1
