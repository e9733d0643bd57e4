"""Entry point of a scheduler: `python -P -m penstock.services.scheduler`."""

import os

from penstock.protocol.transport.process import Process
from penstock.services.scheduler.process import SchedulerProcess


def main() -> None:
    """Run until SIGTERM."""
    process = Process("scheduler")
    try:
        SchedulerProcess(process).loop.run()
    except Exception as error:
        process.log.exception("unexpected error")
        raise SystemExit(os.EX_SOFTWARE) from error  # the supervisor then drops its records
    process.context.destroy()


if __name__ == "__main__":
    main()
