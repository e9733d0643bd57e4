"""The options of `launch chaos`: type, limits, default and description of each."""

from typing import Annotated

from msgspec import Meta, Struct

from penstock.protocol.messages.sampling import Share

Count = Annotated[int, Meta(ge=1)]
KINDS = ("gateway", "tokenizer", "scheduler", "worker", "detokenizer")


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
