"""The pipeline that a command or a program uses: a running pipeline, or a private one."""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.hub import hub_model, resolve
from penstock.launch.pipeline.options import as_flags, flag
from penstock.launch.pipeline.owner import ReadyPipe
from penstock.launch.pipeline.procfile import read_procfile
from penstock.launch.pipeline.run_folder import is_running, running_config
from penstock.protocol.checkpoint import ModelError, read_model_config
from penstock.protocol.client.client import Client
from penstock.protocol.client.session import NoAnswer
from penstock.protocol.config import Config, run_folder

# options that only matter to other users of the pipeline; given options override them
NOBODY_ELSE = {"http": 0, "drain_timeout": 0}
# seconds without a sign of the pipeline, after which the client checks whether it still runs
SILENCE = 10.0
_numbers = itertools.count()


@contextlib.contextmanager
def target(
    options: dict[str, Any], prefix: str, defaults: dict[str, Any], *flags: str
) -> Iterator[Config]:
    """Yield the running pipeline of `options["name"]`, or a pipeline that ends with the block.

    options: given options. prefix: start of the new pipeline's name. defaults: its options unless
    given. flags: additional flags of `launch all`. Raises LaunchError for invalid options.
    """
    options = dict(options)
    if name := options.pop("name", None):
        check_no_options(options)
        yield running_config(name)
        return
    options = defaults | resolve(options)
    if hub_model(options) is None:
        vocab_size(Config(**options))  # reports a wrong --model with one sentence, here
    with private_pipeline(prefix, options, *flags) as config:
        yield config


def check_no_options(options: dict[str, Any]) -> None:
    """Raise LaunchError if there is an option, since a running pipeline accepts none."""
    if options:
        raise LaunchError(f"{flag(next(iter(options)))} is for a pipeline that is yet to start")


def vocab_size(config: Config) -> int:
    """Return the size of the model's vocabulary. Raises LaunchError."""
    try:
        return read_model_config(config.model_folder).vocab_size
    except ModelError as error:
        raise LaunchError(f"--model: {error}") from error


@contextlib.contextmanager
def private_pipeline(
    prefix: str, options: dict[str, Any], *flags: str, **commands: str
) -> Iterator[Config]:
    """Run `launch all` with these options and flags until the block ends.

    prefix: start of the pipeline's name. commands: replace lines of the procfile. Raises
    LaunchError with the pipeline's last output if it does not start. If the pipeline ends before
    the block, this output goes to the terminal. Ctrl-C in the terminal does not reach the pipeline,
    which runs in a separate session. The pipeline also ends with this process.
    """
    name = f"{prefix}-{os.getpid()}-{next(_numbers)}"
    own = {"name": name, "endpoint": f"ipc://{run_folder(name)}/clients"}
    launch = [sys.executable, "-P", "-m", "penstock.launch", "all"]
    with (
        _procfile(commands) as procfile,
        contextlib.closing(ReadyPipe()) as ready,
        subprocess.Popen(
            [*launch, *as_flags(own | NOBODY_ELSE | options), *procfile, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | ready.environment,
            pass_fds=[ready.write.fileno()],
            start_new_session=True,
        ) as process,
    ):
        said: deque[str] = deque(maxlen=20)
        # read the log to its end, since a full pipe would stop the pipeline; Python does not wait
        # for a daemon thread before it calls functions registered with `atexit`, such as the end of
        # a block
        drain = threading.Thread(target=lambda: said.extend(process.stdout or ()), daemon=True)
        drain.start()
        is_ready = has_ended = False
        try:
            if is_ready := ready.wait(process):
                yield running_config(name)
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
    """Yield the flags for a procfile in which commands are replaced."""
    if not commands:
        yield []
        return
    with tempfile.NamedTemporaryFile("w", prefix="penstock-", suffix=".procfile") as file:
        lines = read_procfile() | commands
        file.write("".join(f"{kind}: {line}\n" for kind, line in lines.items()))
        file.flush()
        yield ["--procfile", file.name]


def free_port() -> int:
    """Return a TCP port that is currently free."""
    with socket.create_server(("127.0.0.1", 0)) as trial:
        return int(trial.getsockname()[1])


class LocalClient(Client):
    """Client that notices when the pipeline has ended."""

    def __init__(self, endpoint: str, name: str | None, keys: str = "") -> None:
        """Connect; name: the pipeline's name; None: it may be elsewhere, and is waited for."""
        super().__init__(endpoint, timeout=SILENCE, keys=keys)
        self._name = name

    def wait(self) -> None:
        """Wait, with no limit for an answer. Raises LaunchError if no answer can come."""
        try:
            super().wait()
        except NoAnswer:
            if self._name and not is_running(self._name):
                raise LaunchError(f"pipeline {self._name!r} ended before it answered") from None
