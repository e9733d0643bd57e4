"""Whether the pipeline works: told from what its processes do, not from what they said once."""

import asyncio
import time

from penstock.protocol.client.client import AsyncClient
from penstock.protocol.messages.status import SchedulerStatus, StatusReply
from penstock.services.http.errors import ApiError

LOOK_TIMEOUT = 2.0
"""seconds for a new report of the scheduler, which it sends every half second"""


class Watch:
    """Looks at the pipeline when somebody asks, and remembers the look before."""

    def __init__(self, client: AsyncClient, step_timeout: float) -> None:
        self._client = client
        self._step_timeout = step_timeout
        self._since: dict[tuple[int, int], float] = {}
        """(epoch of a scheduler, its step that runs) → when that was first seen"""

    async def check(self) -> None:
        """Raises ApiError (503), with what is missing."""
        try:
            status = await asyncio.wait_for(self._client.status(fresh=True), LOOK_TIMEOUT)
        except TimeoutError:
            raise _unavailable(await self._who_is_silent()) from None
        if not status.serves:
            raise _unavailable(missing(status))
        seconds = self._seconds_at_step(status.schedulers)
        if seconds > self._step_timeout:
            raise _unavailable(f"no step has ended for {seconds:.0f} s")

    async def check_ready(self) -> None:
        """The same, as the gateway has heard it last."""
        try:
            status = await asyncio.wait_for(self._client.status(), LOOK_TIMEOUT)
        except TimeoutError:
            raise _unavailable("the gateway does not answer") from None
        if not status.serves:
            raise _unavailable(missing(status))
        if status.draining:
            raise _unavailable("the pipeline stops and takes no more requests")

    def _seconds_at_step(self, schedulers: list[SchedulerStatus]) -> float:
        """A step that was there at the look before, too, has lasted since at least then. The
        longest of all replicas."""
        now = time.monotonic()
        steps = [(one.epoch, one.num_steps) for one in schedulers if one.num_running]
        self._since = {step: self._since.get(step, now) for step in steps}
        return now - min(self._since.values(), default=now)

    async def _who_is_silent(self) -> str:
        try:
            status = await asyncio.wait_for(self._client.status(), LOOK_TIMEOUT)
        except TimeoutError:
            return "the gateway does not answer"
        return "the scheduler does not report" if status.serves else missing(status)


def missing(status: StatusReply) -> str:
    """Which stages a pipeline lacks that does not serve."""
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


def _unavailable(reason: str) -> ApiError:
    return ApiError(503, reason, headers={"Retry-After": "1"})
