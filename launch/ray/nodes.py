"""Shared by the processes of a pipeline: a directory of addresses, and run folders on nodes."""

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
    """Context of sockets whose addresses are fixed before any process starts."""

    fixed: dict[str, str]  # name → `tcp://` address
    _folder: Path

    def __init__(self, host: str, folder: Path) -> None:
        """Initialize.

        host: address at which other machines reach this machine. folder: folder with the keys.
        """
        super().__init__(host=host)
        self._folder, self.fixed = folder, {}
        self.admit(ZAP_DOMAIN, folder / KEYS_FOLDER)

    def bind_socket(self, socket: "zmq.Socket[bytes]", endpoint: str) -> None:
        """Bind like `Context.bind_socket`, with names bound to free ports of `host`."""
        if endpoint.startswith(CLUSTER):
            self.fixed[endpoint.removeprefix(CLUSTER)] = bind_tcp(socket, self.host, self._folder)
        else:
            super().bind_socket(socket, endpoint)


class DirectoryServer:
    """Server that collects announcements of processes and sends the directory to all of them."""

    def __init__(self, network: FixedNetwork, on_change: Callable[[Directory], None]) -> None:
        self.channel = network.bind(zmq.ROUTER, f"{CLUSTER}directory", Announcement)
        self._on_change = on_change
        self._directory = Directory({})
        self._peers: set[bytes] = set()

    def handle(self) -> None:
        """Handle all waiting announcements; an announcing process receives the whole directory."""
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
    """Folder created by a node's first process that enters, and removed when the last one leaves.

    Each process holds a shared lock on the folder, which the kernel releases when its holder dies.
    A process that could lock the folder exclusively removes it, including the remains of a killed
    pipeline.
    """

    def __init__(self, run: str) -> None:
        """Enter the folder; run: unique name for the pipeline on this node."""
        # a name that pipelines can't have
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
        """Write a file that only this user can read; readers see the old or the new content.

        Raises FileNotFoundError after `leave`, since nothing would remove the folder again.
        """
        target = self.path / path
        for parent in reversed(Path(path).parents[:-1]):  # the last parent is the folder itself
            (self.path / parent).mkdir(mode=0o700, exist_ok=True)
        descriptor, new = tempfile.mkstemp(dir=target.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        return Path(new).rename(target)


def _enter(folder: Path) -> int:
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        lock = _open(folder)
    except FileNotFoundError:  # another process has just removed it
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
    """Remove the folder if only the holder of `lock` is in it, and release the lock."""
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
