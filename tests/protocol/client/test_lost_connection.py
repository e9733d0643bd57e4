"""A connection that is lost while its messages are received, in a process that libzmq could end.

With ZMQ_IMMEDIATE, libzmq drops what a lost connection has left. It ends the process (`Assertion
failed: !_more`) if this happens between two frames of one message.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from penstock.protocol.client.client import Client
from penstock.protocol.messages.client import AbortRequest

CLIENT = """
import math, sys
from penstock.protocol.client import connection
from penstock.protocol.client.client import Client
from penstock.protocol.transport import channel
from tests.launch.fake_gateway import TEXT, Gateway, delta, gateway, reply

endpoint, turn = sys.argv[1], float(sys.argv[2])
connection.TURN = turn
now, is_lost = channel.monotonic, False
first = Gateway(endpoint, lambda request: [delta(request, 0, 1)] * 200)

def lose():
    '''Lose the connection when its first frame has been received; libzmq then knows of it.'''
    global is_lost
    if first.heard and not is_lost:
        is_lost = True
        first.close()
        assert client._connection.monitor.poll(60_000)
    return now()

channel.monotonic = lose
with Client(endpoint, timeout=60) as client:
    if turn < math.inf:
        client._connection.on_rest = lambda: None
    stream = client.stream("x")
    while not is_lost:
        client.wait()
    with gateway(endpoint, lambda request: [reply(request)]):
        assert stream.result().text == TEXT
"""


@pytest.mark.parametrize("turn", ["0", "1", "inf"])
def test_a_connection_that_is_lost_between_frames(tmp_path: Path, turn: str) -> None:
    """After each frame, after up to 1 s of them, and in a blocking client."""
    client = subprocess.run(
        [sys.executable, "-c", CLIENT, f"ipc://{tmp_path}/clients", turn],
        cwd=Path(__file__).parents[3],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert (client.returncode, client.stderr) == (0, "")


def test_a_question_after_restarts_is_sent_once(tmp_path: Path) -> None:
    """The gateway has restarted three times since the client looked for messages."""
    endpoint = f"ipc://{tmp_path}/clients"
    with Client(endpoint, timeout=60) as client:
        for number in range(4):
            with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
                router.linger = 0
                monitor = router.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
                router.bind(endpoint)
                assert monitor.poll(60_000)
                router.disable_monitor()
                if number < 3:
                    continue
                for request_id in ("first", "last"):
                    client._connection.ask(AbortRequest(request_id=request_id))
                poller, received = zmq.Poller(), b""
                for socket in router, client._connection.monitor:
                    poller.register(socket, zmq.POLLIN)
                while b"last" not in received:
                    ready = dict(poller.poll(60_000))
                    assert ready
                    client._connection.take()  # the client may hear of its handshake later
                    if router in ready:
                        received += b"".join(router.recv_multipart()[1:])
                assert received.count(b"first") == 1
