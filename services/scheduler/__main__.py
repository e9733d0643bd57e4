"""Entry point of a scheduler process, and of the process from which schedulers are forked."""

import os

from penstock.protocol.transport.forks import serve_forks
from penstock.protocol.transport.process import Process
from penstock.services.scheduler.process import SchedulerProcess


def main() -> None:
    """Run until SIGTERM."""
    process = Process("scheduler")
    try:
        SchedulerProcess(process).loop.run()
    except Exception as error:
        process.log.exception("unexpected error")
        raise SystemExit(os.EX_SOFTWARE) from error  # its records are not used again
    process.context.destroy()


serve_forks(lambda: None)
main()
