"""A pipeline under attack, and the innocent requests that run in it."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from penstock.launch.pipeline.control_client import list_processes
from penstock.launch.pipeline.ephemeral_pipeline import free_port
from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.owner import ReadySocket
from penstock.launch.pipeline.procfile import read_procfile
from penstock.launch.pipeline.run_folder import running_config
from penstock.protocol.client.client import Client
from penstock.protocol.client.errors import ClientError
from penstock.protocol.messages.status import ProcessStatus

PROMPTS = [f"count from {first} to {first + 30}" for first in range(10, 90, 20)]
ANSWER_TIMEOUT = 60.0
"""seconds without a sign of the pipeline, after which a request counts as lost"""
END_TIMEOUT = 60.0


class Innocents:
    """Clients that ask one stream after the other, and compare each with what it should be."""

    def __init__(self, endpoint: str) -> None:
        self.num_asked = self.num_lost = self.num_different = 0
        self.reasons: list[str] = []
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        with Client(endpoint, timeout=ANSWER_TIMEOUT) as client:
            client.status(wait=True)
            self._expected = {prompt: client.generate(prompt).token_ids for prompt in PROMPTS}
        self._threads = [threading.Thread(target=self._ask, args=(one,)) for one in PROMPTS]
        for thread in self._threads:
            thread.start()

    def stop_asking(self) -> None:
        """Lets streams that run come to their ends."""
        self._is_over.set()

    def wait(self) -> None:
        """Return when every request has its answer, or is lost."""
        self.stop_asking()
        for thread in self._threads:
            thread.join()

    def _ask(self, prompt: str) -> None:
        with Client(self._endpoint, timeout=ANSWER_TIMEOUT) as client:
            while not self._is_over.is_set():
                self._ask_once(client, prompt)

    def _ask_once(self, client: Client, prompt: str) -> None:
        lost, tokens = "", []
        try:
            for delta in client.stream(prompt):
                tokens += delta.token_ids
        except ClientError as error:
            lost = str(error)
        with self._lock:
            self.num_asked += 1
            self.num_lost += bool(lost)
            self.num_different += not lost and tokens != self._expected[prompt]
            if lost:
                self.reasons.append(lost)


class Ground:
    """One pipeline: its endpoints, its processes, and the innocent clients."""

    def __init__(self, name: str, port: int, http_port: int, supervisor: psutil.Process) -> None:
        self.name = name
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.port = port
        self.http_port = http_port
        self.supervisor = supervisor
        self.folder = running_config(name).run_folder
        self.innocents: Innocents
        self._num_restarts = 0

    def begin(self) -> None:
        """Start innocent clients, and reset the counts."""
        self.innocents = Innocents(self.endpoint)
        self._num_restarts = self._restarts()
        Path(f"/proc/{self.pid('gateway')}/clear_refs").write_text("5")  # the peak of its memory

    @property
    def num_restarts(self) -> int:
        """Processes that were restarted since `begin`."""
        return self._restarts() - self._num_restarts

    def _restarts(self) -> int:
        return sum(one.restarts for one in self.processes())

    @property
    def has_ended(self) -> bool:
        """The supervisor is not there any more."""
        return not self.supervisor.is_running() or (
            self.supervisor.status() == psutil.STATUS_ZOMBIE
        )

    def ends(self) -> bool:
        """Wait for the supervisor's exit; return False if it does not come."""
        with contextlib.suppress(psutil.TimeoutExpired):
            self.supervisor.wait(END_TIMEOUT)
        return self.has_ended

    def processes(self) -> list[ProcessStatus]:
        """Raise LaunchError if the supervisor does not reply."""
        return list_processes(self.name, 20)

    def pid(self, kind: str) -> int:
        """Return the pid of the first process of a kind."""
        return next(p.pid for p in self.processes() if p.name.startswith(f"{kind}."))

    def kill(self, kind: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to the first process of a kind."""
        os.kill(self.pid(kind), number)

    def client(self) -> Client:
        """Return a client of the attacker."""
        return Client(self.endpoint, timeout=ANSWER_TIMEOUT)

    def check(self) -> None:
        """Has a new client get an answer. Raises LaunchError, RequestError."""
        with self.client() as client:
            client.generate("17+25=")

    def peak_bytes(self) -> int:
        """Most bytes that the gateway has had resident, if it was not restarted."""
        lines = Path(f"/proc/{self.pid('gateway')}/status").read_text().splitlines()
        return next(int(one.split()[1]) << 10 for one in lines if one.startswith("VmHWM"))


@contextlib.contextmanager
def ground(flags: list[str], commands: dict[str, str], stdout: Any) -> Iterator[Ground]:
    """Start a pipeline, which ends with the block.

    `commands` replace lines of the procfile; `stdout`: of `launch all`. Raises LaunchError if the
    pipeline does not start.
    """
    launch = [sys.executable, "-P", "-m", "penstock.launch"]
    name, port, http_port = f"aimed-{os.getpid()}", free_port(), free_port()
    own = ["--name", name, "--endpoint", f"tcp://127.0.0.1:{port}", "--http", "1"]
    own += ["--http-port", str(http_port), "--drain-timeout", "30", "--log-level", "error"]
    with (
        tempfile.NamedTemporaryFile("w", suffix=".procfile") as procfile,
        contextlib.closing(ReadySocket()) as ready,
    ):
        lines = read_procfile() | commands
        procfile.write("".join(f"{kind}: {line}\n" for kind, line in lines.items()))
        procfile.flush()
        process = subprocess.Popen(
            [*launch, "all", *own, "--procfile", procfile.name, *flags],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            env=os.environ | ready.environment,
            start_new_session=True,
        )
        try:
            if not ready.wait(process.pid):
                raise LaunchError("the pipeline did not start")
            yield Ground(name, port, http_port, psutil.Process(process.pid))
        finally:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.send_signal(number)
            process.wait(END_TIMEOUT if number == signal.SIGKILL else END_TIMEOUT / 4)
            return
