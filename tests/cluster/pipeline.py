"""`launch all --backend ray` on the machines of `machines.py`, as a user runs it there."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Self

from tests.cluster.machines import RAY_PORT, Cluster

LAUNCH = (sys.executable, "-P", "-m", "penstock.launch")
PORT = 5555
START_TIMEOUT = 120.0
"""seconds; Ray starts a Python process for each of ours, all at once"""
STOP_TIMEOUT = 30.0
NAME = "default"


class Pipeline:
    """A pipeline whose launcher runs on the first machine, and everything it has said."""

    def __init__(self, cluster: Cluster, *flags: str) -> None:
        self.machine = cluster.machines[0]
        self.endpoint = f"tcp://{self.machine.address}:{PORT}"
        self.output: list[tuple[float, str]] = []
        """moments of `time.monotonic`, and lines"""
        self._spoken = threading.Condition()
        self._is_over = False
        folder = cluster.folder / "run"
        folder.mkdir(mode=0o700)
        self.run_folder = folder / f"penstock-{os.getuid()}" / NAME
        self._environment = os.environ | {"XDG_RUNTIME_DIR": str(folder)}
        where = ["--backend", "ray", "--address", f"{self.machine.address}:{RAY_PORT}"]
        small = ["--device", "cpu", "--num-threads", "1", "--kv-cache-gib", "0.1", "--http", "0"]
        self.process = self.machine.run(
            *(*LAUNCH, "all", *where, *small, *flags),
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Self:
        """Return when it is ready."""
        try:
            self.wait_for("ready: ", START_TIMEOUT)
        except AssertionError:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> int:
        """Without a drain, unless it has ended: the exit code."""
        for _ in range(2):
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(STOP_TIMEOUT)
        self._reader.join(STOP_TIMEOUT)
        return code

    def said(self) -> str:
        """All its lines."""
        return "".join(line for _, line in self.output)

    def wait_for(self, pattern: str, timeout: float, start: int = 0) -> float:
        """Wait for a line that begins like `pattern`, at `start` or later in `output`.

        Return the moment when it came.
        """

        def found() -> list[float]:
            return [at for at, line in self.output[start:] if re.match(pattern, line)]

        with self._spoken:
            self._spoken.wait_for(lambda: self._is_over or found(), timeout)
            moments = found()
        assert moments, f"no {pattern!r} in:\n{self.said()}"
        return moments[0]

    def run(self, *arguments: str, codes: tuple[int, ...] = (0,)) -> str:
        """Return the output of `launch …` on the first machine; codes: of its exit."""
        process = self.machine.run(
            *(*LAUNCH, *arguments), env=self._environment, stdout=subprocess.PIPE
        )
        output, _ = process.communicate(timeout=START_TIMEOUT)
        assert process.returncode in codes, f"{arguments}: {output}\n{self.said()}"
        return str(output)

    def nodes(self) -> dict[str, str]:
        """Return the address of the machine of each process that runs."""
        status = json.loads(self.run("status", "--json", codes=(0, 1)))
        return {one["name"]: one["node"] for one in status["processes"] if one["pid"]}

    def _read(self) -> None:
        for line in self.process.stdout or ():
            with self._spoken:
                self.output.append((time.monotonic(), line))
                self._spoken.notify_all()
        with self._spoken:
            self._is_over = True
            self._spoken.notify_all()
