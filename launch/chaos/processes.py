"""Kills: their schedule, and the processes of a pipeline that receive them.

Moments are counted in events instead of seconds: tokens received by the load, or a restarted
process. A schedule therefore means the same on slow and fast machines.
"""

import asyncio
import contextlib
import signal
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Annotated, Literal, Self, get_args

import msgspec
import psutil
import zmq
from msgspec import Meta, Struct

from penstock.launch.pipeline.control_client import TIMEOUT, list_processes, send_signal
from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.procfile import kind_of
from penstock.launch.pipeline.run_folder import control_endpoint
from penstock.protocol.config import run_folder
from penstock.protocol.messages.sampling import Share
from penstock.protocol.messages.supervisor import ControlReply, ListProcesses, Spawned
from penstock.protocol.transport.context import Context, attend, leave

Count = Annotated[int, Meta(ge=1)]
KINDS = ("gateway", "tokenizer", "scheduler", "worker", "detokenizer")
MAX_TOKENS_BETWEEN = 500
SEVERAL = "several"
Moment = Literal["restart", "token"]
MOMENTS: tuple[Moment, ...] = get_args(Moment)


class ChaosOptions(Struct, kw_only=True, frozen=True):
    """Options of the kills and of the load."""

    kills: Count = 40
    """number of signals to send to processes"""
    seed: int = 0
    """random seed of the requests and of the schedule"""
    stop_share: Share = 0.2
    """share of signals that are SIGSTOP; the others are SIGKILL"""
    together: Share = 0.2
    """share of events that hit two or three processes at once"""
    during_recovery: Share = 0.2
    """share of events followed by another kill before the pipeline has recovered"""
    num_requests: Count = 200
    """minimum number of requests; more are sent until the last recovery"""
    concurrency: Count = 16
    """requests in flight"""
    distinct: Count = 40
    """number of different requests; each is first answered without kills"""
    abort_share: Share = 0.0
    """share of requests that are aborted at a random moment"""
    recovery_timeout: Annotated[float, Meta(gt=0)] = 120.0
    """seconds within which the pipeline must recover from a kill"""


class Kill(Struct, frozen=True):
    """Signal to a process."""

    process: str
    how: Literal["SIGKILL", "SIGSTOP"]

    @property
    def number(self) -> signal.Signals:
        return signal.Signals[self.how]


class Event(Struct, frozen=True):
    """Kills at a moment, and possibly a further kill before the pipeline has recovered."""

    # tokens that the load receives between the recovery from the last event and this event
    num_tokens: int
    kills: list[Kill]
    again: Kill | None = None
    # when `again` is sent: after the first processes were restarted, or after the first token that
    # follows
    moment: Moment = "restart"

    @property
    def all_kills(self) -> list[Kill]:
        """Return the kills at the first moment, and the later kill."""
        return [*self.kills, *([self.again] if self.again else [])]

    @property
    def kind(self) -> str:
        """Return the kind of the killed process, or `several` for more than one kill."""
        return SEVERAL if len(self.all_kills) > 1 else kind_of(self.kills[0].process)

    @property
    def has_stop(self) -> bool:
        """Return whether the recovery begins with a hang that must be detected."""
        return any(kill.how == "SIGSTOP" for kill in self.all_kills)


def make_schedule(names: list[str], options: ChaosOptions) -> list[Event]:
    """Return events with a total of `options.kills` kills of the named processes.

    All kinds are equally likely, however many processes they have.
    """
    draw = Random(f"schedule {options.seed}")  # noqa: S311  to be repeatable, not secret
    events: list[Event] = []
    left = options.kills
    while left:
        events.append(_draw_event(draw, names, options, left))
        left -= len(events[-1].all_kills)
    return events


def _draw_event(draw: Random, names: list[str], options: ChaosOptions, most: int) -> Event:
    number = draw.choice((2, 3)) if draw.random() < options.together else 1
    kills: list[Kill] = []
    for _ in range(min(number, len(names), most)):
        left = [name for name in names if name not in (kill.process for kill in kills)]
        kills.append(_draw_kill(draw, left, options.stop_share))
    again = None
    if draw.random() < options.during_recovery and len(kills) < most:
        again = _draw_kill(draw, names, options.stop_share)
        if kind_of(again.process) in {kind_of(kill.process) for kill in kills}:
            # a process that has just started: detecting its hang would take a whole --step-timeout
            again = msgspec.structs.replace(again, how="SIGKILL")
    num_tokens, moment = draw.randint(1, MAX_TOKENS_BETWEEN), draw.choice(MOMENTS)
    return Event(num_tokens=num_tokens, kills=kills, again=again, moment=moment)


def _draw_kill(draw: Random, names: list[str], stop_share: float) -> Kill:
    kind = draw.choice([kind for kind in KINDS if kind in map(kind_of, names)])
    process = draw.choice([name for name in names if kind_of(name) == kind])
    return Kill(process, "SIGSTOP" if draw.random() < stop_share else "SIGKILL")


class Changes:
    """Notification of tasks that wait for a condition, which any news may fulfil."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        news, self._next = self._next, asyncio.Event()
        news.set()

    async def until(self, true: Callable[[], bool], silence: float | None = None) -> None:
        """Wait until `true()` holds. Raises TimeoutError after `silence` seconds without news."""
        while not true():
            async with asyncio.timeout(silence):
                await self._next.wait()


class Processes:
    """Map from name to pid, updated by the supervisor's events; use it with `async with`."""

    def __init__(self, pipeline: str, changes: Changes) -> None:
        self.num_restarts: Counter[str] = Counter()  # by name of the process
        # all processes seen so far, if the pipeline uses only this machine
        self.seen: list[psutil.Process] = []
        self.pids: dict[str, int] = {}
        self._pipeline = pipeline
        self._changes = changes

    async def __aenter__(self) -> Self:
        """Connect. Raises LaunchError if the supervisor does not reply."""
        self._context: Context = Context()
        endpoint = control_endpoint(run_folder(self._pipeline))
        self._events = self._context.connect(zmq.DEALER, endpoint, ControlReply | Spawned)
        self._handlers = [(self._events, self._receive)]
        self._events.send(ListProcesses(watch=True))
        attend(self._handlers)
        try:
            await self._changes.until(lambda: bool(self.pids), TIMEOUT)
        except TimeoutError:
            raise LaunchError(f"the supervisor of {self._pipeline!r} does not reply") from None
        return self

    async def __aexit__(self, *_: object) -> None:
        leave(self._handlers)
        self._context.destroy(linger=0)

    def send(self, kill: Kill) -> int:
        """Send the signal; return the pid, which `is_replaced` needs.

        A process that has just exited by itself receives no signal; the result is the same.
        """
        pid = self.pids[kill.process]
        send_signal(self._pipeline, kill.process, pid, kill.number)
        return pid

    def is_replaced(self, hit: dict[str, int]) -> bool:
        """Return whether each process (name → pid) was restarted."""
        return all(self.pids[name] != pid for name, pid in hit.items())

    def memory(self) -> dict[str, int]:
        """Return the resident bytes by kind, for existing processes."""
        used: Counter[str] = Counter()
        for process in list_processes(self._pipeline):
            used[kind_of(process.name)] += process.rss_bytes
        return dict(used)

    def _receive(self) -> None:
        """Receive the list of processes from the reply, and restarted processes later."""
        for _, message in self._events.receive():
            if isinstance(message, ControlReply):
                for process in message.processes:
                    self._see(process.name, process.pid, process.node)
            elif message.name in self.pids:
                self.num_restarts[message.name] += 1
                self._see(message.name, message.pid, message.node)
            self._changes.notify()

    def _see(self, name: str, pid: int, node: str) -> None:
        self.pids[name] = pid
        with contextlib.suppress(psutil.NoSuchProcess):
            self.seen += [] if node else [psutil.Process(pid)]
