"""Endpoints that other machines may reach, and their requirements."""

from pathlib import Path

import pytest
import zmq

from penstock.protocol.config import Config
from penstock.protocol.transport.context import Context, check_reach, stays_on_host

LOCAL = [
    "ipc:///tmp/clients",
    "tcp://127.0.0.1:5555",
    "tcp://127.9.9.9:5555",
    "tcp://[::1]:5555",
    "tcp://localhost:5555",
]
REACHED = [
    "tcp://0.0.0.0:5555",
    "tcp://*:5555",
    "tcp://192.168.1.2:5555",
    "tcp://[::]:5555",
    "tcp://[2001:db8::1]:5555",
    "tcp://[::ffff:10.0.0.1]:5555",
    "tcp://gpu1:5555",
    "tcp://localhost.example.org:5555",
    "tcp://127.0.0.1.example.org:5555",
    "tcp://eth0:5555",
    "tcp://5555",
    "ws://127.0.0.1:5555",
]


@pytest.mark.parametrize("endpoint", LOCAL)
def test_what_stays_on_the_host_needs_no_keys(endpoint: str) -> None:
    assert stays_on_host(endpoint)
    check_reach(Config(endpoint=endpoint))


@pytest.mark.parametrize("endpoint", REACHED)
def test_what_others_reach_needs_keys_or_consent(endpoint: str) -> None:
    assert not stays_on_host(endpoint)
    with pytest.raises(ValueError, match="may be reached from other machines") as refused:
        check_reach(Config(endpoint=endpoint))
    sentence = str(refused.value)
    assert sentence.startswith(f"--endpoint {endpoint} ")
    assert all(
        way in sentence for way in ("--curve-keys FOLDER", "`launch keys FOLDER`", "--insecure")
    )
    check_reach(Config(endpoint=endpoint, curve_keys="folder"))
    check_reach(Config(endpoint=endpoint, insecure=True))


def test_a_file_is_not_replaced_by_a_socket(context: Context, tmp_path: Path) -> None:
    """libzmq would replace it. Processes that start without `launch` refuse it, too."""
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(zmq.ZMQError, match=r"File exists \(ipc://.*/notes\)"):
        context.bind(zmq.PULL, f"ipc://{tmp_path}/notes", None)
    assert (tmp_path / "notes").read_text() == "mine"
