"""Status of a pipeline: its age, and its processes."""

import contextlib
import json
import signal
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from penstock.protocol.messages.client import StatusRequest
from tests.pipeline.conftest import Pipeline

pytestmark = pytest.mark.pipeline
ANSWER_TIMEOUT_MS = 30_000


def answer(socket: "zmq.Socket[bytes]") -> bytes:
    """Return the next answer; the first byte of JSON is a brace."""
    assert socket.poll(ANSWER_TIMEOUT_MS)
    frame: bytes = socket.recv_multipart()[-1]
    return frame


def test_a_fresh_status_waits_for_the_scheduler(disturbed: Pipeline) -> None:
    """A stopped scheduler reports nothing, so a plain query after the fresh one overtakes it.

    The fresh query is in JSON, the plain one in MessagePack, so that the answers differ.
    """
    scheduler = psutil.Process(disturbed.processes()["scheduler.1"])
    plain = msgspec.msgpack.encode(StatusRequest())
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(disturbed.endpoint)
        scheduler.send_signal(signal.SIGSTOP)
        try:
            socket.send_multipart([b"", plain])
            answer(socket)  # what the scheduler said before has been read
            socket.send_multipart([b"", msgspec.json.encode(StatusRequest(fresh=True))])
            socket.send_multipart([b"", plain])
            assert not answer(socket).startswith(b"{")
        finally:
            scheduler.send_signal(signal.SIGCONT)
        assert answer(socket).startswith(b"{")


def test_the_gateway_answers_for_every_process(disturbed: Pipeline) -> None:
    """The supervisor reports every heartbeat, so the next reports come with the scheduler's."""
    names = ["gateway.1", "tokenizer.1", "scheduler.1", "worker.1", "detokenizer.1", "http.1"]
    with disturbed.client() as client:
        client.generate("17+25=")
        processes = client.status().processes
        # an earlier test may have scaled down: those processes end later
        while [process.name for process in processes] != names or not all(
            one.counters.get(f"messages_{way}_total")
            for one in processes
            for way in ("sent", "received")
        ):
            processes = client.status(fresh=True).processes
    for one in processes:
        assert one.counters["bad_frames_total"] == 0
        assert one.rss_bytes > 1 << 20
        assert one.cpu_seconds > 0
    assert "open_requests" in processes[0].counters
    shown = disturbed.status()
    assert shown["processes"][0]["rss_bytes"] > 1 << 20
    assert [one["name"] for one in shown["gateway"]["processes"]] == names


def test_every_line_is_json(tmp_path: Path) -> None:
    """From the start to the end, of a process that dies, too. A pipeline without HTTP."""
    running = Pipeline("--log-format", "json")
    with contextlib.ExitStack() as stack:
        stack.push(running)
        running.wait_for('.*"message": "ready: ')
        psutil.Process(running.processes()["tokenizer.1"]).kill()
        running.wait_for('.*"message": "tokenizer.1 died with signal 9; restarted"')
        (tmp_path / "in").touch()
        refused = running.run("batch", str(tmp_path / "in"), str(tmp_path / "out"))
    assert refused.returncode == 2
    refusal = f"launch: pipeline {running.name!r} has no HTTP process; `launch scale http 1 --name"
    assert refused.stderr.splitlines()[-1] == f"{refusal} {running.name}` starts one"
    lines = [json.loads(line) for line in running.output]
    assert {"launch", "scheduler.1"} <= {line["process"] for line in lines}
    assert any(line.get("level") == "info" for line in lines)
