"""A pipeline of one's own: for benchmarks, and for whatever must not meet other requests."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from penstock.launch.errors import LaunchError
from penstock.launch.procfile import read_procfile


@contextlib.contextmanager
def private_pipeline(name: str, *flags: str, **commands: str) -> Iterator[str]:
    """Runs `launch all` with these flags until the block ends; gives its endpoint.

    `commands` take the place of lines of the procfile. Raises LaunchError with the pipeline's last
    words if it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        endpoint = f"ipc://{folder}/clients"
        procfile = Path(folder) / "procfile"
        lines = read_procfile() | commands
        procfile.write_text("".join(f"{kind}: {line}\n" for kind, line in lines.items()))
        launch = [sys.executable, "-P", "-m", "penstock.launch", "all", "--name", name]
        where = ["--endpoint", endpoint, "--procfile", str(procfile)]
        with subprocess.Popen(
            [*launch, *where, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        ) as process:
            drain = threading.Thread(target=_drain, args=[process])
            try:
                _wait_for_ready(process)
                drain.start()
                yield endpoint
            finally:
                process.send_signal(signal.SIGTERM)
                process.communicate() if drain.ident is None else drain.join()


def _drain(process: "subprocess.Popen[str]") -> None:
    """Reads the log to its end: a full pipe would stop the pipeline."""
    for _ in process.stdout or ():
        pass


def _wait_for_ready(process: "subprocess.Popen[str]") -> None:
    said: list[str] = []
    for line in process.stdout or ():
        if line.startswith("ready: "):
            return
        said.append(line)
    raise LaunchError(f"the pipeline did not start:\n{''.join(said[-20:])}")
