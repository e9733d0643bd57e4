"""A pipeline that a command runs for itself alone."""

import os
import signal
import subprocess
import sys

import pytest

BENCH = ("bench", "latency", "--batches", "1", "--output-tokens", "4", "--runs", "100000")


def test_a_terminated_command_takes_its_pipeline_with_it(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("run")  # `tmp_path` is too long for the names of sockets
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "penstock.launch", *BENCH, "--kv-cache-gib", "0.1"],
        stderr=subprocess.PIPE,
        env=os.environ | {"XDG_RUNTIME_DIR": str(folder)},
    ) as command:
        assert command.stderr
        first = command.stderr.read(1)
        assert first == b".", first + command.stderr.read()
        assert list(folder.glob("penstock-*/*"))
        command.terminate()
        command.stderr.read()
        assert command.wait() == 128 + signal.SIGTERM
    assert not list(folder.glob("penstock-*/*"))
