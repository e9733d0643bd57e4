"""The worker, but a request with a skull in its prompt kills it, as a faulty kernel would."""

import os
import signal
from collections.abc import Callable

from penstock.protocol.config import Config
from penstock.protocol.messages.packed import unpack
from penstock.protocol.messages.plan import BatchPlan
from penstock.protocol.messages.worker import WorkerAssignment
from penstock.services.worker import loading
from penstock.services.worker.__main__ import main
from penstock.services.worker.model_runner import LaunchedStep, ModelRunner

POISON = "☠".encode()[0]
"""the demo model's token ids of text are its bytes; no answer has this one"""


def load(
    config: Config, assignment: WorkerAssignment, on_progress: Callable[[], None]
) -> ModelRunner:
    """Return a runner that can be poisoned."""
    runner = loading.load(config, assignment, on_progress)
    launch = runner.launch

    def launch_or_die(plan: BatchPlan) -> LaunchedStep:
        if any(POISON in unpack(row.token_ids) for row in plan.added):
            os.kill(os.getpid(), signal.SIGKILL)
        return launch(plan)

    runner.launch = launch_or_die  # type: ignore[method-assign]
    return runner


if __name__ == "__main__":
    main(load)
