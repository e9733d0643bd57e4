"""Entry point of a worker: `python -P -m penstock.services.worker`.

The process is crash-only: an unhandled error ends the process, which the supervisor restarts.
"""

import logging
import os
from typing import NoReturn

import torch

from penstock.protocol.checkpoint import ModelError
from penstock.protocol.transport.process import Process
from penstock.services.worker import loading
from penstock.services.worker.process import Load, Worker, WorkerError, use_interface_of

if torch.version.cuda:  # imported before forks, so that forked processes share it
    import triton  # noqa: F401


def main(load: Load = loading.load) -> NoReturn:
    """Run until SIGTERM or an error, then exit at once.

    An orderly exit could hang: NCCL waits for CUDA graphs that hold its communicators, and for
    ranks that have exited.
    """
    process = Process("worker")
    code = 1
    try:
        _run(process, load)
        code = 0
    except ModelError as error:
        process.log.error("%s", error)
        code = os.EX_CONFIG
    except (WorkerError, ConnectionError, SystemExit) as error:
        process.log.error("%s", error)
    except Exception:
        process.log.exception("unexpected error")
        code = os.EX_SOFTWARE  # the next worker does not reuse memory that may be corrupt
    logging.shutdown()
    os._exit(code)


def _run(process: Process, load: Load) -> None:
    worker = Worker(process, load)
    worker.heartbeats.start()
    process.context.on_connected(worker.channel, worker.send_state)
    use_interface_of(process.context.host, spans_nodes=bool(process.context.node_id))
    worker.loop.run()


if __name__ == "__main__":
    main()
