"""Attacks, a pipeline under attack, and the innocent requests that run in it."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import psutil

from penstock.launch.pipeline.control_client import list_processes
from penstock.launch.pipeline.ephemeral_pipeline import free_port, private_pipeline
from penstock.launch.pipeline.run_folder import running_config, supervisor_of
from penstock.protocol.client.client import Client
from penstock.protocol.client.errors import ClientError
from penstock.protocol.config import Config
from penstock.protocol.messages.status import ProcessStatus

PROMPTS = [f"count from {first} to {first + 30}" for first in range(10, 90, 20)]
ANSWER_TIMEOUT = 60.0
"""seconds without a sign of the pipeline, after which a request counts as lost"""
END_TIMEOUT = 60.0


class Innocents:
    """Clients that send one stream after the other, and compare each with what it should be."""

    def __init__(self, endpoint: str) -> None:
        self.num_asked = self.num_lost = self.num_different = 0
        self.reasons: list[str] = []
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        with Client(endpoint, timeout=ANSWER_TIMEOUT) as client:
            client.status(wait=True)
            self._expected = {prompt: client.generate(prompt).token_ids for prompt in PROMPTS}
        self._threads = [threading.Thread(target=self._send, args=(one,)) for one in PROMPTS]
        for thread in self._threads:
            thread.start()

    def stop_sending(self) -> None:
        """Let streams that run come to their ends."""
        self._is_over.set()

    def wait(self) -> None:
        """Return when every request has its answer, or is lost."""
        self.stop_sending()
        for thread in self._threads:
            thread.join()

    def _send(self, prompt: str) -> None:
        with Client(self._endpoint, timeout=ANSWER_TIMEOUT) as client:
            while not self._is_over.is_set():
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
                    self.reasons += [lost] * bool(lost)


class Victim:
    """One pipeline, its processes, and the innocent clients."""

    def __init__(self, config: Config, supervisor: psutil.Process) -> None:
        self.config = config
        self.port = int(config.endpoint.rpartition(":")[2])
        self.supervisor = supervisor
        self.innocents: Innocents
        self._num_restarts = 0

    def begin(self) -> None:
        self.innocents = Innocents(self.config.endpoint)
        self._num_restarts = self._restarts()
        Path(f"/proc/{self.pid('gateway')}/clear_refs").write_text("5")  # the peak of its memory

    @property
    def num_restarts(self) -> int:
        return self._restarts() - self._num_restarts

    def _restarts(self) -> int:
        return sum(one.restarts for one in self.processes())

    @property
    def has_ended(self) -> bool:
        supervisor = self.supervisor
        return not supervisor.is_running() or supervisor.status() == psutil.STATUS_ZOMBIE

    def ends(self) -> bool:
        """Wait for the supervisor's exit; return False if it does not come."""
        with contextlib.suppress(psutil.TimeoutExpired):
            self.supervisor.wait(END_TIMEOUT)
        return self.has_ended

    def stop(self) -> None:
        """End it, also where it does not end by itself."""
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(psutil.TimeoutExpired, psutil.NoSuchProcess):
                self.supervisor.send_signal(number)
                self.supervisor.wait(END_TIMEOUT / 4)
                return

    def processes(self) -> list[ProcessStatus]:
        """Raise LaunchError if the supervisor does not reply."""
        return list_processes(self.config.name, 20)

    def pid(self, kind: str) -> int:
        """Return the pid of the first process of a kind."""
        return next(p.pid for p in self.processes() if p.name.startswith(f"{kind}."))

    def kill(self, kind: str) -> None:
        """Send SIGKILL to the first process of a kind."""
        os.kill(self.pid(kind), signal.SIGKILL)

    def client(self, timeout: float = ANSWER_TIMEOUT) -> Client:
        return Client(self.config.endpoint, timeout=timeout)

    def check(self) -> None:
        """Wait until a new client has an answer. Raises LaunchError, RequestError."""
        with self.client() as client:
            client.generate("17+25=")

    def peak_bytes(self) -> int:
        """Most bytes that the gateway has had resident, if it was not restarted."""
        lines = Path(f"/proc/{self.pid('gateway')}/status").read_text().splitlines()
        return next(int(one.split()[1]) << 10 for one in lines if one.startswith("VmHWM"))


@contextlib.contextmanager
def victim(flags: list[str], commands: dict[str, str], stdout: int) -> Iterator[Victim]:
    """Start a pipeline, which ends with the block.

    `commands` replace lines of the procfile; `stdout`: of `launch all`. Raises LaunchError if the
    pipeline does not start.
    """
    name = f"aimed-{os.getpid()}"
    own = ["--endpoint", f"tcp://127.0.0.1:{free_port()}", "--http", "1"]
    own += ["--http-port", str(free_port()), "--drain-timeout", "30", "--log-level", "error"]
    with private_pipeline(name, *own, *flags, stdout=stdout, **commands):
        one = Victim(running_config(name), psutil.Process(supervisor_of(name)))
        try:
            yield one
        finally:
            one.stop()


Run = Callable[[Victim], str | None]
"""returns what the attacker saw, if that says anything"""


class Attack:
    """Decorator of a function that attacks a pipeline."""

    def __init__(
        self,
        name: str,
        programs: Mapping[str, tuple[str, str]] = MappingProxyType({}),
        is_output_blocked: bool = False,
        ends: bool = False,
    ) -> None:
        """Describe an attack.

        programs: kind of process → source and arguments, in place of the procfile's; ends: the
        pipeline is to end.
        """
        self.name = name
        self.programs = programs
        self.is_output_blocked = is_output_blocked
        self.ends = ends
        self.needs_own = bool(programs or is_output_blocked or ends)
        """other attacks can't use its pipeline"""
        self.run: Run

    def __call__(self, run: Run) -> "Attack":
        self.run = run
        return self
