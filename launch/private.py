"""A pipeline of one's own: for benchmarks, and for whatever must not meet other requests."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from penstock.launch.errors import LaunchError
from penstock.launch.procfile import read_procfile

NOBODY_ELSE = ("--http", "0", "--drain-timeout", "0")
"""what is for others who might use it; flags that are given go before these"""


@contextlib.contextmanager
def private_pipeline(name: str, *flags: str, **commands: str) -> Iterator[str]:
    """Runs `launch all` with these flags until the block ends; gives its endpoint.

    `commands` take the place of lines of the procfile. Raises LaunchError with the pipeline's last
    words if it does not start; if it ends before the block they go to the terminal. A terminal's
    Ctrl-C does not reach it: it is in a session of its own.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        endpoint = f"ipc://{folder}/clients"
        procfile = Path(folder) / "procfile"
        lines = read_procfile() | commands
        procfile.write_text("".join(f"{kind}: {line}\n" for kind, line in lines.items()))
        launch = [sys.executable, "-P", "-m", "penstock.launch", "all", "--name", name]
        where = ["--endpoint", endpoint, "--procfile", str(procfile)]
        with subprocess.Popen(
            [*launch, *where, *NOBODY_ELSE, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        ) as process:
            said: deque[str] = deque(maxlen=20)
            # to the log's end, for a full pipe would stop the pipeline; Python does not wait for a
            # daemon before it calls what is registered with `atexit`, as the end of a block may be
            drain = threading.Thread(target=lambda: said.extend(process.stdout or ()), daemon=True)
            try:
                _wait_for_ready(process, said)
                drain.start()
                yield endpoint
            finally:
                has_ended = drain.ident is not None and process.poll() is not None
                process.send_signal(signal.SIGTERM)
                process.communicate() if drain.ident is None else drain.join()
                if has_ended:
                    print(f"the pipeline ended:\n{''.join(said)}", end="", file=sys.stderr)


def free_port() -> int:
    """A TCP port that nobody listens at now."""
    with socket.create_server(("127.0.0.1", 0)) as trial:
        return int(trial.getsockname()[1])


def _wait_for_ready(process: "subprocess.Popen[str]", said: "deque[str]") -> None:
    for line in process.stdout or ():
        if line.startswith("ready: "):
            return
        said.append(line)
    raise LaunchError(f"the pipeline did not start:\n{''.join(said)}")
