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

from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.owner import ReadySocket
from penstock.launch.pipeline.procfile import read_procfile
from penstock.protocol.config import run_folder

NOBODY_ELSE = ("--http", "0", "--drain-timeout", "0")
"""what is for others who might use it; flags that are given go before these"""


@contextlib.contextmanager
def private_pipeline(name: str, *flags: str, **commands: str) -> Iterator[str]:
    """Run `launch all` with these flags until the block ends; gives its endpoint.

    `commands` take the place of lines of the procfile. Raises LaunchError with the pipeline's last
    words if it does not start; if it ends before the block they go to the terminal. A terminal's
    Ctrl-C does not reach it: it is in a session of its own. It ends with this process, too.
    """
    endpoint = f"ipc://{run_folder(name)}/clients"
    launch = [sys.executable, "-P", "-m", "penstock.launch", "all", "--name", name]
    with (
        _procfile(commands) as procfile,
        contextlib.closing(ReadySocket()) as ready,
        subprocess.Popen(
            [*launch, "--endpoint", endpoint, *procfile, *NOBODY_ELSE, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | ready.environment,
            start_new_session=True,
        ) as process,
    ):
        said: deque[str] = deque(maxlen=20)
        # to the log's end, for a full pipe would stop the pipeline; Python does not wait for a
        # daemon before it calls what is registered with `atexit`, as the end of a block may be
        drain = threading.Thread(target=lambda: said.extend(process.stdout or ()), daemon=True)
        drain.start()
        is_ready = has_ended = False
        try:
            if is_ready := ready.wait(process):
                yield endpoint
        finally:
            has_ended = process.poll() is not None
            process.send_signal(signal.SIGTERM)
            drain.join()
            if is_ready and has_ended:
                print(f"the pipeline ended:\n{''.join(said)}", end="", file=sys.stderr)
        if not is_ready:
            raise LaunchError(f"the pipeline did not start:\n{''.join(said)}")


@contextlib.contextmanager
def _procfile(commands: dict[str, str]) -> Iterator[list[str]]:
    """Yield the flags for a procfile with other commands than penstock's own."""
    if not commands:
        yield []
        return
    with tempfile.NamedTemporaryFile("w", prefix="penstock-", suffix=".procfile") as file:
        lines = read_procfile() | commands
        file.write("".join(f"{kind}: {line}\n" for kind, line in lines.items()))
        file.flush()
        yield ["--procfile", file.name]


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as trial:
        return int(trial.getsockname()[1])
