"""The options of `launch chaos`: type, limits, default and description of each."""

from typing import Annotated

from msgspec import Meta, Struct

from penstock.protocol.messages.sampling import Share

Count = Annotated[int, Meta(ge=1)]
KINDS = ("gateway", "tokenizer", "scheduler", "worker", "detokenizer")


class ChaosOptions(Struct, kw_only=True, frozen=True):
    """Options of the kills and of the load."""

    kills: Count = 40
    """signals sent to processes"""
    seed: int = 0
    """of the requests and of the schedule"""
    stop_share: Share = 0.2
    """share of kills that are SIGSTOP, the others are SIGKILL"""
    together: Share = 0.2
    """share of events that hit two or three processes at once"""
    during_recovery: Share = 0.2
    """share of events with one more kill before all is whole again"""
    num_requests: Count = 200
    """least requests sent; they continue until the last kill is over"""
    concurrency: Count = 16
    """requests in flight"""
    distinct: Count = 40
    """different requests; each is answered first without kills"""
    abort_share: Share = 0.0
    """share of requests that are aborted at a random moment"""
    recovery_timeout: Annotated[float, Meta(gt=0)] = 120.0
    """seconds after which a kill counts as not recovered from"""
