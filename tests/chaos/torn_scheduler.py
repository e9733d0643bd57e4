"""The scheduler, but it dies when rank 0 has a plan that rank 1 never gets, if a file exists."""

import os
import signal
from pathlib import Path

import msgspec

from penstock.protocol.messages.plan import BatchPlan
from penstock.protocol.messages.worker import ToWorker
from penstock.protocol.transport.process import Process
from penstock.services.scheduler.process import SchedulerProcess

FILE_VARIABLE = "TEST_TORN_PLAN"
"""names the file, which is removed: one death"""


class TornScheduler(SchedulerProcess):
    """A scheduler that may die between the two sends of a plan."""

    def __init__(self, process: Process) -> None:
        super().__init__(process)
        self._file = Path(os.environ[FILE_VARIABLE])
        send, decode = self.workers.send_bytes, msgspec.msgpack.Decoder(ToWorker).decode

        def send_or_die(frame: bytes, to: bytes = b"") -> bool:
            is_last = to in self.group.members[1:]
            if is_last and isinstance(decode(frame), BatchPlan) and self._file.exists():
                self._file.unlink()
                process.context.destroy(linger=-1)  # what was sent before leaves this process
                os.kill(os.getpid(), signal.SIGKILL)
            return send(frame, to)

        self.workers.send_bytes = send_or_die  # type: ignore[method-assign]


if __name__ == "__main__":
    TornScheduler(Process("scheduler")).loop.run()
