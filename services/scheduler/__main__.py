"""`python -P -m penstock.services.scheduler`."""

from penstock.protocol.transport.process import Process
from penstock.services.scheduler.process import SchedulerProcess


def main() -> None:
    """Run until SIGTERM."""
    process = Process("scheduler")
    SchedulerProcess(process).loop.run()
    process.context.destroy()


main()
