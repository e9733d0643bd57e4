"""Schedule of kills: processes, signals and moments, drawn from a seed before anything runs.

Moments are counted in events, not in seconds: tokens that the load receives, a process that was
restarted. So a schedule means the same on a slow machine and on a fast one.
"""

import signal
from random import Random
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from penstock.launch.pipeline.procfile import kind_of
from penstock.protocol.messages.sampling import Share

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
    """A signal to one process."""

    process: str
    how: Literal["SIGKILL", "SIGSTOP"]

    @property
    def number(self) -> signal.Signals:
        return signal.Signals[self.how]


class Event(Struct, frozen=True):
    """Kills at one moment, and perhaps one more before the pipeline is whole again."""

    num_tokens: int  # that the load receives between the recovery from the last event and this one
    kills: list[Kill]
    again: Kill | None = None
    # of `again`: the first processes were started again, or the first token after that has come
    moment: Moment = "restart"

    @property
    def all_kills(self) -> list[Kill]:
        """Return the kills at the first moment, and the late one."""
        return [*self.kills, *([self.again] if self.again else [])]

    @property
    def kind(self) -> str:
        """Return the kind of the process that is hit; `several` for more kills than one."""
        return SEVERAL if len(self.all_kills) > 1 else kind_of(self.kills[0].process)

    @property
    def has_stop(self) -> bool:
        """Return whether its recovery begins with a hang that must be detected."""
        return any(kill.how == "SIGSTOP" for kill in self.all_kills)


def make_schedule(names: list[str], options: ChaosOptions) -> list[Event]:
    """Return events with `options.kills` kills in all, of the processes named.

    Each kind is as likely as the others, however many processes it has.
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
            # it has just been started: to find that it hangs would take a whole --step-timeout
            again = msgspec.structs.replace(again, how="SIGKILL")
    num_tokens, moment = draw.randint(1, MAX_TOKENS_BETWEEN), draw.choice(MOMENTS)
    return Event(num_tokens=num_tokens, kills=kills, again=again, moment=moment)


def _draw_kill(draw: Random, names: list[str], stop_share: float) -> Kill:
    kind = draw.choice([kind for kind in KINDS if kind in map(kind_of, names)])
    process = draw.choice([name for name in names if kind_of(name) == kind])
    return Kill(process, "SIGSTOP" if draw.random() < stop_share else "SIGKILL")
