"""A machine that is suspended and resumed: all processes stand still, and nobody is to blame."""

import signal
import subprocess
from collections.abc import Callable

import psutil
import pytest

from penstock.protocol.transport.channel import HEARTBEAT_INTERVAL, MAX_MISSED_HEARTBEATS
from tests.pipeline.conftest import Pipeline
from tests.tools.demo.tasks import answer_to, count_prompt

pytestmark = [pytest.mark.pipeline, pytest.mark.long]
PROMPT = count_prompt(1, 100)


def test_all_stand_still_and_go_on(pipeline: Callable[..., Pipeline]) -> None:
    """For longer than any of them waits for another one."""
    running = pipeline("--tp", "2", "--hang-timeout", "3")
    before = running.processes()
    everyone = [psutil.Process(running.process.pid), *running.children()]
    with running.client() as client:
        streams = [client.stream(PROMPT) for _ in range(4)]
        begun = [next(iter(stream)).text for stream in streams]
        running.process.send_signal(signal.SIGSTOP)  # the supervisor, so that it restarts nothing
        psutil.Process(before["worker.1"]).suspend()
        assert client.status().num_requests == 4  # without a worker they can't end
        for process in everyone:
            process.send_signal(signal.SIGSTOP)
        subprocess.run(["sleep", str((MAX_MISSED_HEARTBEATS + 2) * HEARTBEAT_INTERVAL)], check=True)
        for process in everyone:
            process.send_signal(signal.SIGCONT)
        rest = ["".join(delta.text for delta in stream) for stream in streams]
        assert [stream.result().text for stream in streams] == [answer_to(PROMPT)] * 4
        assert [a + b for a, b in zip(begun, rest, strict=True)] == [answer_to(PROMPT)] * 4
    assert running.processes() == before
    assert not [line for line in running.output if "died" in line or "gone" in line]
