"""The directory of a pipeline's addresses, at the supervisor, and the socket of its heartbeats."""

from collections.abc import Callable
from pathlib import Path

import zmq

from penstock.protocol.transport.context import CLUSTER, Context
from penstock.protocol.transport.discovery import (
    KEYS_FOLDER,
    ZAP_DOMAIN,
    Announcement,
    Directory,
    bind_tcp,
)


class FixedNetwork(Context):
    """The context of sockets whose addresses are known before any process starts."""

    fixed: dict[str, str]  # name → `tcp://` address
    _folder: Path

    def __init__(self, host: str, folder: Path) -> None:
        """host: address at which other machines reach this one; folder: with the keys in it."""
        super().__init__(host=host)
        self._folder, self.fixed = folder, {}
        self.admit(ZAP_DOMAIN, folder / KEYS_FOLDER)

    def bind_socket(self, socket: "zmq.Socket[bytes]", endpoint: str) -> None:
        """Bind as `Context.bind_socket` does; a name is bound at a free port of `host`."""
        if endpoint.startswith(CLUSTER):
            tcp = bind_tcp(socket, self.host, self._folder)
            self.fixed[endpoint.removeprefix(CLUSTER)] = tcp
        else:
            super().bind_socket(socket, endpoint)


class DirectoryServer:
    """Server that collects announcements of processes, and sends the directory to all of them."""

    def __init__(self, network: FixedNetwork, on_change: Callable[[Directory], None]) -> None:
        self.channel = network.bind(zmq.ROUTER, f"{CLUSTER}directory", Announcement)
        self._on_change = on_change
        self._directory = Directory({})
        self._peers: set[bytes] = set()

    def handle(self) -> None:
        """Every announcement that waits. Who announces itself knows nothing yet."""
        for identity, announcement in self.channel.receive():
            self._peers.add(identity)
            if self._directory.add(announcement):
                self._on_change(self._directory)
                self._send(set(self._peers))
            else:
                self._send({identity})

    def _send(self, peers: set[bytes]) -> None:
        frame = self.channel.encode(self._directory)
        self._peers -= {peer for peer in peers if not self.channel.send_bytes(frame, peer)}
