"""Client of a pipeline on this machine that waits for answers however long they take."""

from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.run_folder import is_running
from penstock.protocol.client.client import Client
from penstock.protocol.client.errors import NoAnswer

SILENCE = 10.0
"""seconds without a sign of the pipeline after which a look is taken whether it is still there"""


class LocalClient(Client):
    """A client that notices when the pipeline has ended."""

    def __init__(self, endpoint: str, name: str | None, keys: str = "") -> None:
        """name: of the pipeline; None for one on another machine, which is waited for."""
        super().__init__(endpoint, timeout=SILENCE, keys=keys)
        self._name = name

    def wait(self) -> None:
        """Wait, however long an answer takes. Raises LaunchError if none can come."""
        try:
            super().wait()
        except NoAnswer:
            if self._name and not is_running(self._name):
                raise LaunchError(f"pipeline {self._name!r} ended before it answered") from None
