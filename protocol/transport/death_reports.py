"""Reports to the supervisor of requests that may have ended processes."""

import os
from collections import OrderedDict
from collections.abc import Iterable

import zmq

from penstock.protocol.messages.supervisor import PoisonFound, ProcessesDied, SuspectsCleared
from penstock.protocol.transport.channel import Channel
from penstock.protocol.transport.process import SUPERVISOR_VARIABLE, Process

MAX_SUSPECTS = 1 << 14  # requests whose deaths are remembered, the newest


class DeathReports:
    """Reports to the supervisor, if there is one, which requests may have ended processes."""

    def __init__(self, process: Process) -> None:
        # digests that were reported and not cleared, the newest
        self.suspects: OrderedDict[bytes, None] = OrderedDict()
        self._channel: Channel[None] | None = None
        if SUPERVISOR_VARIABLE in os.environ:
            self._channel = process.context.connect(zmq.PUSH, process.endpoints.supervisor)

    def died(self, processes: list[tuple[str, int]], suspects: list[bytes]) -> None:
        if self._channel and processes and suspects:
            self._channel.send(ProcessesDied(processes, suspects))
            self.suspects |= dict.fromkeys(suspects)
            while len(self.suspects) > MAX_SUSPECTS:
                self.suspects.popitem(last=False)

    def clear(self, digests: Iterable[bytes]) -> None:
        """Report cleared requests as `SuspectsCleared`, if they were suspects."""
        cleared = [one for one in digests if self.suspects.pop(one, one) is None]
        if self._channel and cleared:
            self._channel.send(SuspectsCleared(cleared))

    def found(self, digest: bytes) -> None:
        if self._channel:
            self._channel.send(PoisonFound(digest))
