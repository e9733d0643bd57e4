"""The options of `launch chaos`: type, limits, default and description of each."""

from typing import Annotated

from msgspec import Meta, Struct

from penstock.protocol.messages.sampling import Share

Count = Annotated[int, Meta(ge=1)]
KINDS = ("gateway", "tokenizer", "scheduler", "worker", "detokenizer")


class ChaosOptions(Struct, kw_only=True, frozen=True):
    """Options of the kills and of the load."""

    kills: Annotated[Count, Meta(description="signals sent to processes")] = 40
    seed: Annotated[int, Meta(description="of the requests and of the schedule")] = 0
    stop_share: Annotated[
        Share, Meta(description="share of kills that are SIGSTOP, the others are SIGKILL")
    ] = 0.2
    together: Annotated[
        Share, Meta(description="share of events that hit two or three processes at once")
    ] = 0.2
    during_recovery: Annotated[
        Share, Meta(description="share of events with one more kill before all is whole again")
    ] = 0.2
    num_requests: Annotated[
        Count, Meta(description="least requests sent; they continue until the last kill is over")
    ] = 200
    concurrency: Annotated[Count, Meta(description="requests in flight")] = 16
    distinct: Annotated[
        Count, Meta(description="different requests; each is answered first without kills")
    ] = 40
    abort_share: Annotated[
        Share, Meta(description="share of requests that are aborted at a random moment")
    ] = 0.0
    recovery_timeout: Annotated[
        float, Meta(gt=0, description="seconds after which a kill counts as not recovered from")
    ] = 120.0
