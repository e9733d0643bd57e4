"""How old the answer to a status request may be."""

import signal
from collections.abc import Callable

import msgspec
import psutil
import pytest
import zmq

from penstock.protocol.client import StatusRequest
from tests.pipeline.conftest import Pipeline

pytestmark = pytest.mark.pipeline
ANSWER_TIMEOUT_MS = 30_000


def answer(socket: "zmq.Socket[bytes]") -> bytes:
    """The next answer; the first byte of JSON is a brace."""
    assert socket.poll(ANSWER_TIMEOUT_MS)
    frame: bytes = socket.recv_multipart()[-1]
    return frame


def test_a_fresh_status_waits_for_the_scheduler(pipeline: Callable[..., Pipeline]) -> None:
    """A stopped scheduler reports nothing, so a plain question behind the fresh one overtakes it.

    The fresh one is asked in JSON, the plain one in MessagePack: that tells the answers apart.
    """
    running = pipeline()
    scheduler = psutil.Process(running.processes()["scheduler.1"])
    plain = msgspec.msgpack.encode(StatusRequest())
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(running.endpoint)
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
