"""Requests to the supervisor's control socket, from a thread of their own."""

import os
import resource
import select
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from penstock.launch.pipeline.control_client import list_processes, request
from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.run_folder import control_endpoint
from penstock.protocol.config import MAX_PROCESSES, run_folder
from penstock.protocol.messages.supervisor import (
    ControlReply,
    ControlRequest,
    ListProcesses,
    RestartProcesses,
    ScaleProcesses,
    Spawned,
)
from penstock.protocol.transport.context import Context
from tests.launch.supervisor.conftest import Supervise


def run_beside(supervise: Supervise, act: Callable[[], None]) -> None:
    """Do something while a tokenizer runs; then the pipeline is stopped."""

    def act_and_stop() -> None:
        act()
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=act_and_stop)
    assert supervise(thread.start, tokenizer="sh -c 'echo up; exec sleep 60'") == 0
    thread.join()


def test_commands_for_one_kind_run_one_after_the_other(supervise: Supervise) -> None:
    """Each reports what is true when it is done; one for a process that has left is refused."""
    numbers = [3, 1, 3, 1, 3]
    replies: list[ControlReply] = []

    def send() -> None:
        scales = [ScaleProcesses("tokenizer", number) for number in [*numbers, MAX_PROCESSES + 1]]
        with Context() as context:
            channel = context.connect(zmq.DEALER, control_endpoint(run_folder("x")), ControlReply)
            for message in [*scales, RestartProcesses(["tokenizer.9"])]:
                channel.send(message)
            while len(replies) < len(scales) + 1:
                assert channel.socket.poll(60_000)
                replies.extend(reply for _, reply in channel.receive())
            channel.socket.close()
        replies.append(ControlReply(processes=list_processes("x")))

    run_beside(supervise, send)
    *scaled, refused, restarted, listed = replies
    assert [reply.number for reply in scaled] == numbers
    assert refused.error == "number: got 257, expected up to 256 of a kind"
    assert restarted.error == "process: got 'tokenizer.9', which does not run any more"
    names = [one.name for one in listed.processes]
    assert names == ["tokenizer.1", "tokenizer.2", "tokenizer.3"]


@pytest.fixture
def few_open_files() -> Iterator[int]:
    """Limit open files to 300 more than this process has, and yield the limit."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 300 + len([*Path("/proc/self/fd").iterdir()])
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    yield most
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_more_processes_than_descriptors_are_refused(
    few_open_files: int, supervise: Supervise
) -> None:
    replies: list[int | str] = []

    def send() -> None:
        for number in (200, 2):
            try:
                replies.append(request("x", ScaleProcesses("tokenizer", number)).number)
            except LaunchError as error:
                replies.append(str(error))

    run_beside(supervise, send)
    refused, scaled = replies
    expected = f"open files: got a limit of {few_open_files}, expected 1328 or more"
    assert str(refused).startswith(expected)
    assert scaled == 2


def test_a_command_that_fails_is_answered_and_logged(
    supervise: Supervise, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also one that the pipeline's end cuts off; a frame that is not a request is dropped."""
    errors: list[str] = []
    stopped: list[threading.Thread] = []

    def ask(message: ControlRequest) -> None:
        with pytest.raises(LaunchError) as caught:
            request("x", message)
        errors.append(str(caught.value))

    def send() -> None:
        with Context() as context:
            channel = context.connect(zmq.DEALER, control_endpoint(run_folder("x")))
            channel.send("rubbish")
            channel.socket.close()
        ask(ScaleProcesses("nothing", 1))
        ask(RestartProcesses([]))
        (tokenizer,) = list_processes("x")
        waiting = threading.Thread(target=ask, args=[RestartProcesses(["tokenizer.1"])])
        with os.fdopen(os.pidfd_open(tokenizer.pid)) as end:
            waiting.start()
            assert select.select([end], [], [], 20)[0]
        stopped.append(waiting)

    run_beside(supervise, send)
    stopped.pop().join()
    assert errors == [
        "kind: got 'nothing', expected one of tokenizer",
        "the command failed: IndexError('list index out of range')",
        "the pipeline ended before the command was done",
    ]
    assert "IndexError: list index out of range\n" in capfd.readouterr().out


def test_a_watcher_hears_of_every_start(supervise: Supervise) -> None:
    heard: list[ControlReply | Spawned] = []

    def watch() -> None:
        with Context() as context:
            endpoint = control_endpoint(run_folder("x"))
            channel = context.connect(zmq.DEALER, endpoint, ControlReply | Spawned)
            channel.send(ListProcesses(watch=True))
            while sum(isinstance(one, Spawned) for one in heard) < 2:
                assert channel.socket.poll(60_000)
                for _, message in channel.receive():
                    heard.append(message)
                    newest = message if isinstance(message, Spawned) else message.processes[0]
                    if len(heard) < 3:  # a third death would end the pipeline before the signal
                        os.kill(newest.pid, signal.SIGKILL)
            channel.socket.close()

    run_beside(supervise, watch)
    reply, *spawned = heard
    assert isinstance(reply, ControlReply)
    assert [one.name for one in reply.processes] == ["tokenizer.1"]
    assert len({reply.processes[0].pid, *(one.pid for one in spawned)}) == 3  # type: ignore[union-attr]
