"""Admission to the clients' socket, with real sockets."""

import logging
import shutil
from pathlib import Path

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from penstock.launch.pipeline.keys import make_keys
from penstock.protocol.transport.channel import OVERSIZE_SLACK
from penstock.protocol.transport.context import Context, secure_client, secure_server
from tests.services.gateway.conftest import TIMEOUT, Harness, Start, request

ADMITTED = zmq.EVENT_HANDSHAKE_SUCCEEDED
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
NO_PROTOCOL = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


@pytest.fixture
def secured(start_gateway: Start, keys: Path) -> Harness:
    return start_gateway(curve_keys=str(keys))


def knock(harness: Harness, keys: Path | None, client: str = "client") -> int:
    """Connect a client that sends a request. Return the event that ends its handshake.

    The request is open if the client was admitted.
    """
    with harness.context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        if keys:
            secure_client(socket, keys, client)
        monitor = socket.get_monitor_socket(ADMITTED | REFUSED | NO_PROTOCOL)
        socket.connect(harness.endpoint)
        name = f"{client} of {keys.name if keys else None}"
        harness.send(socket, request(name))
        harness.wait_for(monitor)
        event = int(recv_monitor_message(monitor)["event"])
        if event == ADMITTED:
            harness.run_until(lambda: harness.ledger.get(name))
        socket.disable_monitor()
        monitor.close()
    return event


def test_an_unknown_key_gets_nothing_in(
    secured: Harness, keys: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The stranger knows the server's public key, and has keys of its own."""
    strange = tmp_path / "strange"
    make_keys(strange, None)
    shutil.copy(keys / "server.key", strange / "server.key")
    with caplog.at_level(logging.WARNING):
        assert [knock(secured, strange) for _ in range(2)] == [REFUSED] * 2
    assert secured.status.reply().num_bad_frames == 2
    assert ["unknown" in message for message in caplog.messages] == [True]
    assert knock(secured, keys) == ADMITTED
    assert len(secured.ledger) == 1


def test_a_client_without_keys_gets_nothing_in(secured: Harness, keys: Path) -> None:
    assert knock(secured, None) == NO_PROTOCOL
    assert knock(secured, keys) == ADMITTED
    assert len(secured.ledger) == 1


def test_keys_are_added_and_removed_while_it_runs(secured: Harness, keys: Path) -> None:
    make_keys(keys, "bob")
    assert knock(secured, keys, "bob") == ADMITTED
    (keys / "clients" / "bob.key").unlink()
    assert knock(secured, keys, "bob") == REFUSED


def test_keys_that_can_not_be_read_let_nobody_in(
    secured: Harness, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (keys / "clients" / "broken.key").write_text("nonsense")
    assert knock(secured, keys) == REFUSED
    assert "broken.key" in caplog.text


def test_where_nobody_answers_for_the_keys_nobody_gets_in(tmp_path: Path, keys: Path) -> None:
    """As when the gateway ends: libzmq would let everybody in if the domain were not enforced."""
    endpoint = f"ipc://{tmp_path}/clients"
    unanswered = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    with (
        Context() as context,
        context.socket(zmq.DEALER) as client,
        context.socket(zmq.ROUTER) as server,
    ):
        secure_server(server, keys)
        server.bind(endpoint)
        secure_client(client, keys, "client")
        monitor = client.get_monitor_socket(ADMITTED | unanswered)
        client.connect(endpoint)
        assert monitor.poll(TIMEOUT)
        event = recv_monitor_message(monitor)["event"]
        client.disable_monitor()
        monitor.close()
    assert event == unanswered


def test_in_the_clear_only_where_it_was_asked_for(
    start_gateway: Start, caplog: pytest.LogCaptureFixture
) -> None:
    harness = start_gateway(endpoint="tcp://0.0.0.0:*", insecure=True, max_request_bytes=2000)
    assert not harness.context.handlers
    assert "network's traffic reads prompts and answers" in caplog.text
    limit = harness.clients.channel.socket.getsockopt(zmq.MAXMSGSIZE)
    assert limit == 2000 + OVERSIZE_SLACK


def test_an_endpoint_that_others_reach_is_refused(start_gateway: Start) -> None:
    with pytest.raises(ValueError, match=r"tcp://0.0.0.0:\* may be reached"):
        start_gateway(endpoint="tcp://0.0.0.0:*")
