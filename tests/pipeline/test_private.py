"""A pipeline that a command runs for itself alone."""

import os
import signal
import subprocess
import sys
from pathlib import Path

BENCH = ("bench", "latency", "--batches", "1", "--output-tokens", "4", "--runs", "100000")


def test_a_terminated_command_takes_its_pipeline_with_it(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "penstock.launch", *BENCH, "--kv-cache-gib", "0.1"],
        stderr=subprocess.PIPE,
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
    ) as command:
        assert command.stderr
        first = command.stderr.read(1)
        assert first == b".", first + command.stderr.read()
        assert list(tmp_path.glob("penstock-*/*"))
        command.terminate()
        command.stderr.read()
        assert command.wait() == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("penstock-*/*"))
