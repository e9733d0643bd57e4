"""Health reports of a pipeline that does not work; the pipeline tests use a real one."""

import pytest

from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.messages.status import ModelStatus, SchedulerStatus, StatusReply
from penstock.services.http import status as health
from penstock.services.http.shared.errors import ApiError
from penstock.services.http.status import HealthCheck, missing


def status(tokenizers: dict[str, int], scheduler: SchedulerStatus | None) -> StatusReply:
    return StatusReply(
        ready=False,
        model="m",
        num_requests=0,
        tokenizers=tokenizers,
        schedulers=[scheduler] if scheduler else [],
        num_bad_frames=0,
    )


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (status({}, None), "no scheduler, no tokenizer, no detokenizer, no worker"),
        (
            status({"t": 0}, SchedulerStatus(epoch=1, ready=False, workers=["w"])),
            "no detokenizer",
        ),
        (
            status(
                {"t": 0},
                SchedulerStatus(epoch=1, ready=False, workers=["w"], detokenizers={"d": 0}),
            ),
            "not all workers are there",
        ),
        (
            status(
                {"t": 0},
                SchedulerStatus(
                    epoch=1,
                    ready=False,
                    workers_ready=True,
                    workers=["w"],
                    detokenizers={"d": 0},
                ),
            ),
            "the scheduler is silent, or serves a gateway that was started later",
        ),
    ],
)
def test_the_missing_stage(found: StatusReply, sentence: str) -> None:
    assert missing(found) == sentence


def test_time_at_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(health.time, "monotonic", lambda: now)
    watch = HealthCheck(AsyncClient(), step_timeout=60.0)

    def look(num_steps: int, num_running: int, epoch: int = 1) -> float:
        one = SchedulerStatus(epoch=epoch, ready=True, num_steps=num_steps, num_running=num_running)
        gets_on = SchedulerStatus(epoch=3, ready=True, num_steps=int(now), num_running=1)
        return watch._seconds_at_step([gets_on, one])

    assert look(5, 0) == 0
    now += 500
    assert look(5, 1) == 0, "nothing ran at the look before"
    now += 70
    assert look(5, 1) == 70
    assert look(5, 1, epoch=2) == 0, "another scheduler"
    now += 70
    assert look(6, 1, epoch=2) == 0
    now += 70
    assert look(6, 0, epoch=2) == 0


@pytest.mark.anyio
@pytest.mark.parametrize("is_draining", [False, True])
async def test_a_pipeline_that_drains_is_not_ready(
    monkeypatch: pytest.MonkeyPatch, is_draining: bool
) -> None:
    async def report(*_: object, **__: object) -> StatusReply:
        one = status({"t": 0}, SchedulerStatus(epoch=1, ready=True))
        one.ready, one.draining = True, is_draining
        return one

    monkeypatch.setattr(AsyncClient, "status", report)
    watch = HealthCheck(AsyncClient(), step_timeout=60.0)
    if is_draining:
        with pytest.raises(ApiError, match="accepts no requests"):
            await watch.check_ready()
    else:
        await watch.check_ready()


def test_the_model_that_does_not_serve_is_named() -> None:
    ready = SchedulerStatus(epoch=1, ready=True)
    both = status({"t": 0}, ready)
    both.models = [
        ModelStatus(
            name=name, model="m", ready=False, num_requests=0, tokenizers={"t": 0}, schedulers=its
        )
        for name, its in (("one", [ready]), ("org/two", []))
    ]
    assert not both.all_serve
    assert missing(both) == "org/two: no scheduler, no detokenizer, no worker"
