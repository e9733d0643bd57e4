"""Sockets that find each other by name, on two "machines": two node ids on one address."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from penstock.launch.pipeline.keys import make_keys
from penstock.launch.ray.nodes import DirectoryServer, FixedNetwork
from penstock.protocol.messages.pipeline import Heartbeat
from penstock.protocol.transport.channel import Channel
from penstock.protocol.transport.context import (
    CLUSTER,
    Context,
    drain,
    secure_client,
    secure_server,
)
from penstock.protocol.transport.discovery import (
    KEYS_CLIENT,
    KEYS_FOLDER,
    ZAP_DOMAIN,
    Cluster,
    Node,
)

HOST = "127.0.0.1"


class Site:
    """A directory, and the processes that a test makes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_keys(folder / KEYS_FOLDER, None)
        make_keys(folder / KEYS_FOLDER, KEYS_CLIENT)
        self.network = FixedNetwork(HOST, folder)
        self.directory = DirectoryServer(self.network, lambda _: None)
        self.network.handlers.append((self.directory.channel, self.directory.handle))
        self.processes: list[Cluster] = []

    def node(self, node_id: str) -> tuple[Node, Path]:
        """Return a machine, and its folder."""
        folder = self.folder / node_id
        folder.mkdir(exist_ok=True)
        if not (folder / KEYS_FOLDER).exists():
            (folder / KEYS_FOLDER).symlink_to(self.folder / KEYS_FOLDER)
        return Node(node_id, node_id, HOST, self.network.fixed), folder

    def process(self, node_id: str) -> Cluster:
        """Return a new process of a machine."""
        self.processes.append(Cluster(*self.node(node_id), 1 + len(self.processes)))
        return self.processes[-1]

    def work_until(self, is_so: Callable[[], Any], *channels: Channel[Any]) -> None:
        """Lets the directory and all processes handle what comes."""
        while not is_so():
            handlers = self.network.handlers + [h for one in self.processes for h in one.handlers]
            sockets = [channel.socket for channel, _ in handlers]
            ready, _, _ = zmq.select(sockets + [one.socket for one in channels], [], [], 60)
            assert ready, "nothing comes any more"
            drain(handlers)

    def hear(self, channel: Channel[Any]) -> Any:
        """Return the next message on a channel."""
        self.work_until(lambda: channel.socket.poll(0), channel)
        return next(channel.receive())[1]

    def destroy(self) -> None:
        for context in [*self.processes, self.network]:
            context.destroy(linger=0)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    one = Site(tmp_path)
    yield one
    one.destroy()


def endpoint_of(channel: Channel[Any], process: Cluster) -> str:
    return process._followings[channel.socket].endpoint


def meet(site: Site, binder: Cluster, connector: Cluster) -> tuple[Channel[Any], Channel[Any]]:
    """One binds a name, the other connects to it and is heard."""
    inbox = binder.bind(zmq.PULL, f"{CLUSTER}requests", Heartbeat)
    sender = connector.connect(zmq.PUSH, f"{CLUSTER}requests", wait=False)
    site.work_until(lambda: endpoint_of(sender, connector))
    sender.send(Heartbeat("hello"))
    assert site.hear(inbox) == Heartbeat("hello")
    return inbox, sender


def test_on_one_machine_through_a_file(site: Site) -> None:
    process = site.process("a")
    _, sender = meet(site, process, site.process("a"))
    assert endpoint_of(sender, site.processes[1]) == f"ipc://{site.folder}/a/requests"


def test_to_another_machine_encrypted(site: Site) -> None:
    _, sender = meet(site, site.process("a"), site.process("b"))
    assert endpoint_of(sender, site.processes[1]).startswith(f"tcp://{HOST}:")
    assert sender.socket.mechanism == zmq.CURVE


def test_a_name_that_moves_is_followed(site: Site) -> None:
    """From machine to machine, and to the own one, though keys can't be taken back there."""
    connector = site.process("b")
    before, sender = meet(site, site.process("a"), connector)
    for node_id in ("c", "b"):
        first = endpoint_of(sender, connector)
        inbox = site.process(node_id).bind(zmq.PULL, f"{CLUSTER}requests", Heartbeat)
        site.work_until(lambda first=first: endpoint_of(sender, connector) != first)
        sender.send(Heartbeat(node_id))
        assert site.hear(inbox) == Heartbeat(node_id)
    assert not before.socket.poll(0)


def test_who_is_older_does_not_take_a_name_back(site: Site) -> None:
    """A machine that was cut off and is back again still has what was started elsewhere since."""
    older, newer = site.process("a"), site.process("b")
    inbox, _ = meet(site, newer, site.process("c"))
    older.bind(zmq.PULL, f"{CLUSTER}requests", Heartbeat)
    later = site.process("c")
    sender = later.connect(zmq.PUSH, f"{CLUSTER}requests", wait=False)
    site.work_until(lambda: endpoint_of(sender, later))
    sender.send(Heartbeat("again"))
    assert site.hear(inbox) == Heartbeat("again")


def test_who_is_back_after_a_broken_connection_ends(site: Site) -> None:
    """Messages may be lost. Another known way is taken instead."""
    process = site.process("b")
    inbox = site.process("a").bind(zmq.ROUTER, f"{CLUSTER}workers", Heartbeat)
    returned: list[str] = []
    sender = process.connect(zmq.DEALER, f"{CLUSTER}workers", wait=False)
    following = process._followings[sender.socket]
    process.on_handshake(sender.socket, following.connected)
    connected: list[str] = []
    process.on_connected(sender, lambda: connected.append("yes"))
    site.work_until(lambda: connected)
    tcp = inbox.socket.getsockopt_string(zmq.LAST_ENDPOINT)
    inbox.socket.unbind(tcp)
    inbox.socket.close()
    again = bind_at(site.processes[1], tcp, site.folder)
    with pytest.raises(SystemExit, match="lost the connection to workers"):
        site.work_until(lambda: False)
    process.on_reconnect(sender, lambda: returned.append("yes"))
    again.close()
    again = bind_at(site.processes[1], tcp, site.folder)
    site.work_until(lambda: returned)
    again.close()


def bind_at(process: Cluster, tcp: str, folder: Path) -> "zmq.Socket[bytes]":
    """Return a socket at an address that was another one's."""
    socket: zmq.Socket[bytes] = process.socket(zmq.ROUTER)
    secure_server(socket, folder / KEYS_FOLDER, ZAP_DOMAIN)
    while True:
        try:
            socket.bind(tcp)
            return socket
        except zmq.ZMQError as error:  # the one before is not closed yet
            assert error.errno == zmq.EADDRINUSE


def test_who_has_no_key_gets_nothing(site: Site, tmp_path: Path) -> None:
    inbox, _ = meet(site, site.process("a"), site.process("b"))
    tcp = inbox.socket.getsockopt_string(zmq.LAST_ENDPOINT)
    make_keys(tmp_path / "other", None)
    make_keys(tmp_path / "other", KEYS_CLIENT)
    (tmp_path / "other" / "server.key").write_bytes(
        (site.folder / KEYS_FOLDER / "server.key").read_bytes()
    )
    with Context() as context:
        for keys in (None, tmp_path / "other"):
            stranger = context.socket(zmq.PUSH)
            stranger.setsockopt(zmq.LINGER, 0)
            if keys:
                secure_client(stranger, keys, KEYS_CLIENT)
            refused = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            events = stranger.get_monitor_socket(refused | zmq.EVENT_DISCONNECTED)
            stranger.connect(tcp)
            site.work_until(lambda events=events: events.poll(0), Channel(events))
            stranger.disable_monitor()
            stranger.close()
    assert not inbox.socket.poll(0)


def test_a_process_waits_for_what_it_needs(site: Site) -> None:
    """Messages sent before the address is known would be lost."""
    inbox = site.process("a").bind(zmq.PULL, f"{CLUSTER}requests", Heartbeat)
    late = site.node("b")

    def run() -> None:
        with Cluster(*late) as process:
            process.connect(zmq.PUSH, f"{CLUSTER}requests").send(Heartbeat("first"))
            process.destroy()

    thread = threading.Thread(target=run)
    thread.start()
    assert site.hear(inbox) == Heartbeat("first")
    thread.join()
