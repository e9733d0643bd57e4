"""The worker's talk with the scheduler, with a runner that computes nothing."""

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from llguidance import LLMatcher

from penstock.protocol.config import Config
from penstock.protocol.messages.structured import StructuredOutputs
from penstock.protocol.messages.worker import (
    CompileGrammars,
    GrammarCompiled,
    WorkerExit,
    WorkerState,
)
from penstock.protocol.transport.context import Context
from penstock.services.worker.grammars import Grammars
from penstock.services.worker.process import WorkerError
from tests.services.worker.plans import plan
from tests.services.worker.talk import Talk, assignment, hello, tokens_of


@pytest.fixture
def context() -> Iterator[Context]:
    context = Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def talk(context: Context, tmp_path: Path) -> Talk:
    return Talk(context, tmp_path)


@pytest.fixture
def seated(talk: Talk) -> Talk:
    """Return a worker of rank 0 in group g, of epoch 1."""
    talk.tell(assignment())
    talk.answer()
    return talk


def test_says_who_it_is_and_then_what_it_holds(talk: Talk) -> None:
    talk.worker.send_state()
    first = talk.answer()
    assert isinstance(first, WorkerState)
    assert first.rendezvous.startswith("tcp://127.0.0.1:")
    first.rendezvous = ""
    assert first == hello("worker.1")
    talk.tell(assignment(rank=1))
    assert talk.answer() == hello("worker.1", "g", 1, 5, 16, (3.0, 4.0), epoch=1)
    talk.worker.send_state()
    assert talk.answer() == hello("worker.1", "g", 1, 5, 16, (3.0, 4.0), epoch=1)


@pytest.mark.parametrize(("has_gpus", "scheme"), [(False, "file:///"), (True, "tcp://127.0.0.1:")])
def test_ranks_on_cpus_of_one_machine_meet_in_a_file(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, has_gpus: bool, scheme: str
) -> None:
    """For torch looks up the name of an address."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpus)
    talk.context.node_id = ""
    talk.worker.send_state()
    hello = talk.answer()
    assert isinstance(hello, WorkerState)
    assert hello.rendezvous.startswith(scheme)


@pytest.mark.parametrize(("interval", "num_hellos"), [(0.0, 2), (3600.0, 0)])
def test_says_hello_while_it_loads(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, interval: float, num_hellos: int
) -> None:
    """No oftener than need be."""
    monkeypatch.setattr("penstock.services.worker.process.HEARTBEAT_INTERVAL", interval)
    talk.num_progress_calls = 2
    talk.tell(assignment())
    for _ in range(num_hellos):
        assert talk.answer() == hello("worker.1", "g", 0, 0)
    assert talk.answer() == hello("worker.1", "g", 0, 5, 16, (3.0, 4.0), epoch=1)


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


def test_with_one_plan_in_flight_every_step_is_waited_for(context: Context, tmp_path: Path) -> None:
    talk = Talk(context, tmp_path, num_plans_in_flight=1)
    talk.tell(assignment())
    talk.answer()
    talk.runner.steps_are_done = False
    talk.tell(plan(0))
    assert talk.answer() == tokens_of(1, 0)


def test_a_step_is_waited_for_if_the_scheduler_waits(seated: Talk) -> None:
    """No plan follows that would end the wait."""
    seated.runner.steps_are_done = False
    asking = plan(0)
    asking.is_awaited = True
    seated.tell(asking)
    assert seated.answer() == tokens_of(1, 0)


def test_only_rank_0_sends_tokens(talk: Talk) -> None:
    talk.tell(assignment(rank=1))
    talk.answer()
    talk.tell(plan(0), plan(1))
    assert len(talk.runner.launched) == 2
    assert talk.says_nothing_more()


def test_a_new_epoch_keeps_the_model_and_drops_the_batch(seated: Talk) -> None:
    seated.runner.steps_are_done = False
    seated.tell(plan(0), assignment(epoch=2))
    assert seated.runner.num_clears == 2
    assert seated.num_loads == 1
    seated.runner.steps_are_done = True
    assert seated.answer() == hello(
        "worker.1", "g", 0, 5, 16, (3.0, 4.0), epoch=2, num_plans_before=1
    )
    seated.tell(plan(1, epoch=1), plan(0, epoch=2))
    assert seated.answer() == tokens_of(2, 0)
    assert seated.says_nothing_more()
    assert [(p.epoch, p.step) for p in seated.runner.launched] == [(1, 0), (2, 0)]


def test_an_assignment_said_again_changes_nothing(seated: Talk) -> None:
    seated.tell(plan(0), assignment(), assignment(epoch=0, group="old"), plan(1))
    assert seated.runner.num_clears == 1
    assert seated.answer() == tokens_of(1, 0)
    assert seated.answer() == tokens_of(1, 1)


@pytest.mark.parametrize(
    ("last", "sentence"),
    [
        (plan(2), "plan: got step 2, expected 1"),
        (plan(0), "plan: got step 0, expected 1"),
        (plan(1, epoch=5), "plan: got epoch 5, expected 1"),
        (assignment(epoch=2, group="h"), "got rank 0 of group h, expected rank 0 of group g"),
        (assignment(rank=1), "got rank 1 of group g"),
        (WorkerExit("worker.2 exited"), r"ended this worker: worker\.2 exited"),
        (CompileGrammars(1, [(1, StructuredOutputs(regex="a"))]), "expected them at rank 0 only"),
    ],
)
def test_what_can_not_be_ends_the_worker(seated: Talk, last: object, sentence: str) -> None:
    seated.runner.logits_processor = SimpleNamespace(grammars=None)  # type: ignore[attr-defined]
    seated.tell(plan(0))
    with pytest.raises(WorkerError, match=sentence):
        seated.tell(last)


def test_a_plan_before_an_assignment_ends_the_worker(talk: Talk) -> None:
    with pytest.raises(WorkerError, match="plan: got epoch 4, expected -1"):
        talk.tell(plan(0, epoch=4))


def test_a_frame_that_is_no_message_is_dropped(seated: Talk) -> None:
    seated.tell_bytes(b"\xc1")
    seated.tell(plan(0))
    assert seated.answer() == tokens_of(1, 0)
    assert seated.worker.channel.num_bad_frames == 1


class HeldGrammars(Grammars):
    """Grammars whose compiler waits for an event."""

    def __init__(self) -> None:
        super().__init__(Config().model_folder)
        self.begun, self.released = threading.Event(), threading.Event()

    def _compile(self, spec: StructuredOutputs) -> LLMatcher:
        self.begun.set()
        self.released.wait()
        return super()._compile(spec)


@pytest.fixture
def grammars(seated: Talk) -> HeldGrammars:
    made = HeldGrammars()
    seated.runner.logits_processor = SimpleNamespace(grammars=made)  # type: ignore[attr-defined]
    return made


def reports(talk: Talk, number: int) -> list[GrammarCompiled]:
    """Run the worker's loop until it has sent `number` reports."""
    found: list[GrammarCompiled] = []

    def receive() -> None:
        messages = [message for _, message in talk.scheduler.receive()]
        found.extend(one for one in messages if isinstance(one, GrammarCompiled))
        if len(found) >= number:
            talk.worker.loop.stop()

    talk.worker.loop.add(talk.scheduler, receive)
    talk.worker.loop.run()
    return found


def test_steps_go_on_while_grammars_are_compiled(seated: Talk, grammars: HeldGrammars) -> None:
    wrong = StructuredOutputs(grammar="start: nothing")
    seated.tell(CompileGrammars(1, [(1, StructuredOutputs(regex="a")), (2, wrong)]))
    for number in range(3):
        seated.tell(plan(number))
        assert seated.answer() == tokens_of(1, number)
    grammars.released.set()
    good, bad = reports(seated, 2)
    assert (good.epoch, good.number, good.error) == (1, 1, "")
    assert bad.number == 2
    assert "nothing" in bad.error


def test_grammars_of_an_earlier_epoch_are_dropped(seated: Talk, grammars: HeldGrammars) -> None:
    for number in (1, 2):
        seated.tell(CompileGrammars(1, [(number, StructuredOutputs(regex="a"))]))
    grammars.begun.wait()
    grammars.clear()
    seated.tell(assignment(epoch=2))
    seated.tell(CompileGrammars(1, [(3, StructuredOutputs(regex="a"))]))
    seated.tell(CompileGrammars(2, [(1, StructuredOutputs(regex="b"))]))
    grammars.released.set()
    *_, last = reports(seated, 2)
    assert (last.epoch, last.number) == (2, 1)
    grammars.add(0, StructuredOutputs(regex="b"), [], [258], number=1)
    masks = np.zeros((1, grammars.num_words), np.int32)
    assert not grammars.fill(masks, {0: 0})
    assert masks[0, ord("b") // 32] == 1 << ord("b") % 32
