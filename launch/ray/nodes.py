"""Shared by the processes of a pipeline: a directory of addresses, a run folder on each node."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import zmq

from penstock.protocol.config import make_own_folder
from penstock.protocol.transport.context import CLUSTER, Context
from penstock.protocol.transport.discovery import (
    KEYS_FOLDER,
    ZAP_DOMAIN,
    Announcement,
    Directory,
    bind_tcp,
)

LOCK_FILE = "lock"


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


class NodeFolder:
    """Made by the first process of a node that enters it, removed with the last one that leaves.

    Each holds a shared lock on it, which the kernel drops when its holder dies: who could have the
    folder alone removes it, also what a pipeline that was killed has left there.
    """

    def __init__(self, run: str) -> None:
        """run: of the pipeline and the node, one that no other has."""
        # a name that no pipeline can have
        parent = Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}" / ".ray"
        for path in (parent.parent, parent):
            make_own_folder(path)
        for left in parent.iterdir():
            _remove_if_left(left)
        self.path = parent / run
        self._lock = _enter(self.path)

    def leave(self) -> None:
        _remove_if_left(self.path, self._lock)

    def write(self, path: str, content: bytes) -> Path:
        """Write a file for this user only; readers see the old or the new content.

        Raises FileNotFoundError after `leave`: nobody would remove the folder again.
        """
        target = self.path / path
        for parent in reversed(Path(path).parents[:-1]):  # the last one is the folder itself
            (self.path / parent).mkdir(mode=0o700, exist_ok=True)
        descriptor, new = tempfile.mkstemp(dir=target.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        return Path(new).rename(target)


def _enter(folder: Path) -> int:
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        lock = _open(folder)
    except FileNotFoundError:  # it was removed in this moment
        return _enter(folder)
    fcntl.flock(lock, fcntl.LOCK_SH)
    if (folder / LOCK_FILE).exists() and os.path.samestat(
        os.fstat(lock), (folder / LOCK_FILE).stat()
    ):
        return lock
    os.close(lock)
    return _enter(folder)


def _open(folder: Path) -> int:
    return os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)


def _remove_if_left(folder: Path, lock: int | None = None) -> None:
    """With nobody in it but the holder of `lock`, which is let go of."""
    try:
        lock = _open(folder) if lock is None else lock
    except FileNotFoundError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return
    finally:
        os.close(lock)
