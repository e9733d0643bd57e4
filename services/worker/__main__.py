"""`python -P -m penstock.services.worker`.

The process is crash-only: any error it can't handle ends the process, which is then restarted.
"""

import logging
import os
from typing import NoReturn

import torch

from penstock.protocol.checkpoint import ModelError
from penstock.protocol.transport.process import Process
from penstock.services.worker import loading
from penstock.services.worker.process import Load, Worker, WorkerError, use_interface_of

if torch.version.cuda:  # the steps need it; forked processes share it
    import triton  # noqa: F401


def main(load: Load = loading.load) -> NoReturn:
    """Run until SIGTERM, or an error.

    The process exits as if killed. In an orderly exit, NCCL would wait forever for CUDA graphs that
    hold its communicators, and for a rank that has exited.
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
        code = os.EX_SOFTWARE  # its memory is not used again: it may be corrupt
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
