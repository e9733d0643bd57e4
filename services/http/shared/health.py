"""Health of the pipeline, by what its processes do now."""

import asyncio
import time
from operator import add

from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.messages.status import ModelStatus, SchedulerStatus, StatusReply
from penstock.services.http.shared.errors import ApiError

STATUS_TIMEOUT = 2.0  # seconds for a new report of the scheduler, which it sends every half second


class HealthCheck:
    """Checks of the pipeline on request, one at a time; the previous check is remembered."""

    def __init__(self, client: AsyncClient, step_timeout: float) -> None:
        self._client = client
        self._step_timeout = step_timeout
        # (epoch of a scheduler, its running step) → the time when that was first seen
        self._since: dict[tuple[int, int], float] = {}
        self._running: asyncio.Future[None] | None = None

    async def check(self) -> None:
        """Raise ApiError (503) if a stage is missing or a step takes too long.

        Who asks while a check runs gets its result: the gateway answers a few at a time.
        """
        if self._running is None or self._running.done():
            self._running = asyncio.ensure_future(self._check())
        await asyncio.shield(self._running)

    async def _check(self) -> None:
        try:
            status = await status_of(self._client, fresh=True)
        except ApiError:
            _check_serves(await status_of(self._client))
            raise ApiError(503, "the scheduler does not report") from None
        _check_serves(status)
        seconds = self._seconds_at_step(status.schedulers)
        if seconds > self._step_timeout:
            raise ApiError(503, f"no step has ended for {seconds:.0f} s")

    async def check_ready(self) -> None:
        """Raise ApiError (503) by the gateway's last report, also while the pipeline drains."""
        status = await status_of(self._client)
        _check_serves(status)
        if status.draining:
            raise ApiError(503, "the pipeline is stopping and accepts no requests")

    def _seconds_at_step(self, schedulers: list[SchedulerStatus]) -> float:
        """Return the longest time since a step that still runs was first seen."""
        now = time.monotonic()
        steps = [(one.epoch, one.num_steps) for one in schedulers if one.num_running]
        self._since = {step: self._since.get(step, now) for step in steps}
        return now - min(self._since.values(), default=now)


async def status_of(client: AsyncClient, **which: bool) -> StatusReply:
    """Return the status as `AsyncClient.status` does. Raises ApiError after STATUS_TIMEOUT."""
    try:
        return await asyncio.wait_for(client.status(**which), STATUS_TIMEOUT)
    except TimeoutError:
        raise ApiError(503, "the gateway does not answer") from None


def _check_serves(status: StatusReply) -> None:
    if not status.all_serve:
        raise ApiError(503, missing(status))


def missing(status: StatusReply) -> str:
    """Return the reason why a pipeline does not serve: the missing stages of its models."""
    waiting = [one for one in status.by_model if not one.serves]
    names = (f"{one.name}: " * bool(status.models) for one in waiting)
    return "; ".join(map(add, names, map(_missing, waiting)))


def _missing(status: ModelStatus) -> str:
    scheduler = status.scheduler
    stages = {
        "scheduler": scheduler is not None,
        "tokenizer": bool(status.tokenizers),
        "detokenizer": bool(scheduler and scheduler.detokenizers),
        "worker": bool(scheduler and scheduler.workers),
    }
    names = [name for name, is_there in stages.items() if not is_there]
    if names:
        return f"no {', no '.join(names)}"
    if scheduler and scheduler.workers_ready:
        return "the scheduler is silent, or serves a gateway that was started later"
    return "not all workers are there"
