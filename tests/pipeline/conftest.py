"""Real pipelines: `launch all` as a user runs it, with a name and an endpoint of its own."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import pytest

from penstock.launch.commands.status import as_json, read_status
from penstock.launch.pipeline.control_client import list_processes
from penstock.launch.pipeline.run_folder import running_config
from penstock.protocol.client.client import Client
from penstock.protocol.config import run_folder
from tests.pipeline.http_api import KEY, MODEL, Api
from tests.pipeline.ports import free_port

LAUNCH = (sys.executable, "-P", "-m", "penstock.launch")
START_TIMEOUT = 120.0
STOP_TIMEOUT = 60.0
PATIENT = ("--hang-timeout", "10000", "--step-timeout", "3600")
"""leaves a suspended process alone"""


class Pipeline:
    """A running `launch all` and its output."""

    def __init__(self, *flags: str, name: str | None = None, endpoint: str | None = None) -> None:
        unique = f"test-{uuid.uuid4().hex[:8]}"
        self.name = name or unique
        self.endpoint = endpoint or f"ipc://{tempfile.gettempdir()}/penstock-{unique}"
        self.output: list[str] = []
        self.expected_exit_code = 0
        self._spoken = threading.Condition()
        self._is_over = False
        where = ["--name", self.name, "--endpoint", self.endpoint]
        # on a busy machine threads wait for each other; a large cache takes long to fill with 0
        small = ["--device", "cpu", "--num-threads", "1", "--kv-cache-gib", "0.1", "--http", "0"]
        self.process = subprocess.Popen(
            [*LAUNCH, "all", *where, *small, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Self:
        self.wait_for("ready: ")
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it, unless that has happened, and check that nothing is left."""
        children = self.children()
        if self.process.poll() is None:
            self.process.terminate()
        assert self.wait() == self.expected_exit_code, "".join(self.output)
        assert not self.alive(children)
        assert not self.run_folder.exists()
        assert not Path(self.endpoint.removeprefix("ipc://")).exists()
        assert "Traceback" not in "".join(self.output)

    @property
    def run_folder(self) -> Path:
        """The folder of its sockets."""
        return run_folder(self.name)

    @property
    def url(self) -> str:
        """Return the base URL of its HTTP process."""
        return f"http://127.0.0.1:{running_config(self.name).http_port}"

    def wait_for(self, pattern: str, start: int = 0) -> str:
        """Wait for a line that begins like `pattern`, at `start` or later in `output`."""

        def found() -> str | None:
            return next((line for line in self.output[start:] if re.match(pattern, line)), None)

        with self._spoken:
            self._spoken.wait_for(lambda: self._is_over or found(), START_TIMEOUT)
            line = found()
        assert line is not None, f"no {pattern!r} in:\n{''.join(self.output)}"
        return line

    def wait(self) -> int:
        """Wait until the supervisor has ended: its exit code."""
        code = self.process.wait(STOP_TIMEOUT)
        self._reader.join(STOP_TIMEOUT)
        return code

    def client(self) -> Client:
        """Return a client that gives up rather than wait for ever."""
        return Client(self.endpoint, timeout=START_TIMEOUT)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `launch …` for this pipeline."""
        command, *rest = arguments
        try:
            return subprocess.run(
                [*LAUNCH, command, "--name", self.name, *rest],
                capture_output=True,
                text=True,
                timeout=START_TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            with self.client() as client:
                status = client.status()
            raise AssertionError(f"{error}: {status}\n{''.join(self.output)}") from error

    def status(self) -> dict[str, Any]:
        """Return the report of `launch status --json`, without a process for it."""
        status: dict[str, Any] = json.loads(as_json(read_status(self.name)))
        return status

    def processes(self) -> dict[str, int]:
        """Return the pid of each process by its name."""
        return {one.name: one.pid for one in list_processes(self.name)}

    def pid(self, name: str) -> int:
        """Return the pid of a process, which may have died while the next one is being forked."""
        while not (pid := self.processes().get(name)):
            continue
        return pid

    def restarts(self) -> dict[str, int]:
        """Return the number of restarts of each process."""
        return {one.name: one.restarts for one in list_processes(self.name)}

    def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal that can't be handled to one process; return when it was restarted."""
        start = len(self.output)
        psutil.Process(self.pid(name)).send_signal(how)
        self.wait_for(rf"launch +\| .* {name} died", start)

    @contextlib.contextmanager
    def suspended(self, name: str) -> Iterator[None]:
        """Suspend one process: without a worker no request can end.

        After a hundredth of `--hang-timeout` the process is killed. `PATIENT` is for pipelines of
        tests that may take longer.
        """
        process = psutil.Process(self.processes()[name])
        process.suspend()
        try:
            yield
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def children(self) -> list[psutil.Process]:
        """Return the processes below the supervisor."""
        try:
            return list(psutil.Process(self.process.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return []

    @staticmethod
    def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
        """Return the processes that are still there some seconds later."""
        _, alive = psutil.wait_procs(processes, timeout=STOP_TIMEOUT)
        return list(alive)

    def _read(self) -> None:
        for line in self.process.stdout or ():
            with self._spoken:
                self.output.append(line)
                self._spoken.notify_all()
        with self._spoken:
            self._is_over = True
            self._spoken.notify_all()


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Callable[..., Pipeline]]:
    """Start pipelines, `pipeline("--tp", "2")`, that are stopped and checked at the end."""
    with contextlib.ExitStack() as stack:

        def start(*flags: str, **where: str) -> Pipeline:
            one = Pipeline(*flags, **where)
            stack.push(one)  # first, so that one that does not become ready is stopped too
            return one.__enter__()

        yield start


@pytest.fixture(scope="session")
def disturbed() -> Iterator[Pipeline]:
    """Start a pipeline for all tests that kill, suspend or scale, and leave it whole."""
    http = ("--http", "1", "--http-port", str(free_port()), "--api-key", KEY)
    with Pipeline(*PATIENT, "--max-deaths", "1000", *http) as one:
        yield one


@pytest.fixture(scope="session")
def shared() -> Iterator[Pipeline]:
    """Start a pipeline with HTTP for all tests that only send requests."""
    port = str(free_port())
    flags = (*PATIENT, "--http", "1", "--http-port", port, "--api-key", KEY)
    more = ("--served-model-name", MODEL, "--max-request-bytes", "100000")
    with Pipeline(*flags, *more) as one:
        yield one


@pytest.fixture(scope="session")
def url(shared: Pipeline) -> str:
    """Return where the shared pipeline serves HTTP."""
    return shared.url


@pytest.fixture
def api(url: str, request: pytest.FixtureRequest) -> Api:
    """Return the `openai` package's client of it, the blocking one by default."""
    return Api(url, getattr(request, "param", "sync") == "async")


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    """Return a plain client of it, with its key."""
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=url, headers=headers, timeout=START_TIMEOUT) as client:
        yield client
