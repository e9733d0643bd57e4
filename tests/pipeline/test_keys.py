"""A pipeline whose clients need keys."""

import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from penstock.launch.pipeline.keys import make_keys
from penstock.protocol.client.client import Client
from penstock.protocol.client.session import RequestError
from tests.pipeline.conftest import LAUNCH, START_TIMEOUT, Pipeline

pytestmark = pytest.mark.pipeline
ANSWER = "42"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "keys"
    make_keys(folder, None)
    return folder


@pytest.fixture(scope="module")
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as trial:
        return int(trial.getsockname()[1])


@pytest.fixture(scope="module")
def served(pipeline: Callable[..., Pipeline], keys: Path, port: int) -> Pipeline:
    return pipeline("--curve-keys", str(keys), endpoint=f"tcp://0.0.0.0:{port}")


@pytest.mark.usefixtures("served")
def test_a_client_with_keys_is_answered(keys: Path, port: int) -> None:
    endpoint = f"tcp://127.0.0.1:{port}"
    with Client(endpoint, keys=keys, timeout=START_TIMEOUT) as client:
        assert client.generate("17+25=").text == ANSWER
    make_keys(keys, "alice")
    with Client(endpoint, keys=keys, client="alice", timeout=START_TIMEOUT) as client:
        assert client.generate("17+25=").text == ANSWER


def test_other_clients_are_told_that_they_are_refused(
    served: Pipeline, keys: Path, port: int, tmp_path: Path
) -> None:
    make_keys(tmp_path / "strange", None)
    shutil.copy(keys / "server.key", tmp_path / "strange" / "server.key")
    before = served.status()["gateway"]["num_bad_frames"]
    for strange in (None, tmp_path / "strange"):
        with (
            Client(f"tcp://127.0.0.1:{port}", keys=strange) as client,
            pytest.raises(RequestError, match="the gateway refuses this client"),
        ):
            client.generate("17+25=")
    served.wait_for(r"gateway\.1 .*refused a client at 127.0.0.1 .* its key .* is unknown")
    assert served.status()["gateway"]["num_bad_frames"] == before + 1


@pytest.mark.usefixtures("served")
def test_a_plain_socket_gets_no_answer(port: int) -> None:
    with zmq.Context() as context, context.socket(zmq.REQ) as plain:
        plain.setsockopt(zmq.LINGER, 0)
        monitor = plain.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )
        plain.connect(f"tcp://127.0.0.1:{port}")
        plain.send(b'{"prompt": "17+25="}')
        assert monitor.poll(START_TIMEOUT * 1000)
        event: dict[str, Any] = recv_monitor_message(monitor)  # type: ignore[assignment]
        assert event["event"] == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        assert not plain.poll(0)
        plain.disable_monitor()
        monitor.close()


def test_commands_find_the_keys(served: Pipeline, keys: Path, port: int) -> None:
    assert served.run("ask", "--raw", "17+25=").stdout == f"{ANSWER}\n"
    assert served.status()["gateway"]["ready"]
    for command, given, typed in (("ask", ["--raw", "17+25="], ""), ("chat", [], "17+25=\n")):
        where = ["--endpoint", f"tcp://127.0.0.1:{port}", "--curve-keys", str(keys)]
        asked = subprocess.run(
            [*LAUNCH, command, *where, *given],
            input=typed,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT,
            check=False,
        )
        assert (asked.returncode, asked.stderr) == (0, "")
        assert ANSWER in asked.stdout


def test_the_run_folder_is_for_this_user_only(served: Pipeline) -> None:
    paths = list(served.run_folder.iterdir())
    assert {"config.json", "lock", "control", "requests"} <= {path.name for path in paths}
    assert served.run_folder.stat().st_mode & 0o777 == 0o700
    assert [path for path in paths if path.stat().st_mode & 0o077] == []
