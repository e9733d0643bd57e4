"""Number of plans in flight, and when they leave."""

import pytest

from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.plan import SampledTokens
from penstock.services.scheduler.in_flight_plan import PlanDepth
from penstock.services.scheduler.process import SchedulerProcess
from tests.services.scheduler.processes import request


def depth_at(most: int, *step_milliseconds: float) -> int:
    """After twenty steps of each length."""
    depth, now = PlanDepth(most), 0.0
    for milliseconds in step_milliseconds:
        for _ in range(20):
            now += milliseconds / 1000
            depth.on_tokens(now)
    return depth.num_plans


@pytest.mark.parametrize(
    ("milliseconds", "num_plans"), [(0.0, 4), (0.6, 4), (1.6, 3), (3.0, 2), (200.0, 2)]
)
def test_short_steps_need_more_plans(milliseconds: float, num_plans: int) -> None:
    assert depth_at(4, milliseconds) == num_plans


def test_never_more_than_allowed() -> None:
    assert [depth_at(most, 0.1) for most in (1, 2, 3, 8)] == [1, 2, 3, 8]
    assert depth_at(1, 200.0) == 1


def test_begins_with_two_and_goes_back_to_two() -> None:
    assert PlanDepth(4).num_plans == 2
    assert depth_at(4, 0.6, 5.0) == 2
    assert depth_at(4, 5.0, 0.6) == 4


def test_one_late_step_changes_little() -> None:
    depth = PlanDepth(4)
    for step in range(40):
        depth.on_tokens(step * 0.5e-3 + (0.4e-3 if step == 39 else 0))
    assert depth.num_plans == 4


def test_tokens_leave_before_the_next_plan(
    process: SchedulerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    process.accept(request())
    assert process.scheduler
    process.scheduler.schedule()
    sampled = SampledTokens(process.scheduler.epoch, 0, pack([5]))
    process.group.members, process.group.epoch = [b"worker"], sampled.epoch
    sent: list[str] = []
    monkeypatch.setattr(process, "schedule", lambda: sent.append("plan"))
    monkeypatch.setattr(process.detokenizers, "send", lambda *_: sent.append("tokens") or True)
    monkeypatch.setattr(process.workers, "receive", lambda: iter([(b"worker", sampled)]))
    process.on_workers()
    assert sent == ["tokens", "plan"]
