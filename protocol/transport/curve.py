"""CURVE keys: the folder that `launch keys` makes, the sockets that use it, and who is admitted.

    server.key           public key of the gateway: every client has it
    server.key_secret    secret key of the gateway: stays with it
    clients/NAME.key     public keys of the clients that the gateway admits
    NAME.key_secret      secret key of one client, which needs only this file and `server.key`

Each file is a certificate of `zmq.auth`.
"""

import logging
from pathlib import Path
from typing import Any

import zmq
from zmq.auth import load_certificate, load_certificates
from zmq.utils import z85

from penstock.protocol.transport.channel import Channel

log = logging.getLogger(__name__)
SERVER = "server"
CLIENTS = "clients"
ZAP_DOMAIN = b"clients"
ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # where libzmq asks who may connect (ZAP, ZeroMQ RFC 27)


class KeysError(ValueError):
    """An unreadable key file, and the reason."""


def secure_server(socket: "zmq.Socket[Any]", folder: Path, domain: bytes = ZAP_DOMAIN) -> None:
    """Let a socket, before it is bound, speak CURVE only. Raises KeysError.

    The domain is enforced: without an `Authenticator` for it, libzmq admits nobody. Otherwise it
    would admit everybody.
    """
    socket.curve_secretkey = _secret_key(folder, SERVER)[1]
    socket.curve_server = True
    socket.setsockopt(zmq.ZAP_DOMAIN, domain)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def secure_client(socket: "zmq.Socket[Any]", folder: Path, client: str) -> None:
    """Let a socket, before it is connected, speak CURVE as `client`. Raises KeysError."""
    socket.curve_publickey, socket.curve_secretkey = _secret_key(folder, client)
    socket.curve_serverkey = _read(folder / f"{SERVER}.key")[0]


def admitted_keys(folder: Path) -> set[bytes]:
    """Return the public keys, in Z85, of the clients that are admitted. Raises KeysError."""
    try:
        return set(load_certificates(folder / CLIENTS))
    except (OSError, ValueError) as error:
        raise KeysError(str(error)) from error


class Authenticator:
    """The set of clients that may connect to the sockets that speak CURVE, by key.

    The folder of a socket's domain is read for every new connection: a key that is added is
    admitted at once, and a removed one opens no further connection.
    """

    def __init__(self, channel: Channel[Any]) -> None:
        """channel: bound to ZAP_ENDPOINT."""
        self.channel = channel
        self.folders: dict[bytes, Path] = {}  # of keys, by domain

    def handle(self) -> None:
        """Answer every query of libzmq that waits. A refused client learns no reason."""
        for frames in self.channel.receive_frames():
            version, number, domain, address, _, _, key = (frame.bytes for frame in frames)
            accepted = self._admits(domain, z85.encode(key), address)
            status = b"200" if accepted else b"400"
            user = z85.encode(key)  # libzmq puts it at each message, as `User-Id`
            self.channel.try_send([version, number, status, b"", user, b""])

    def _admits(self, domain: bytes, key: bytes, address: bytes) -> bool:
        try:
            if key in admitted_keys(self.folders[domain]):
                return True
            reason = f"its key {key.decode()} is unknown"
        except KeysError as error:
            reason = str(error)
        self.channel.num_bad_frames += 1  # `launch status` shows it among what was dropped
        if self.channel.num_bad_frames == 1:
            who = address.decode()
            log.warning("refused a client at %s (further ones are only counted): %s", who, reason)
        return False


def _secret_key(folder: Path, name: str) -> tuple[bytes, bytes]:
    path = folder / f"{name}.key_secret"
    public, secret = _read(path)
    if secret is None:
        raise KeysError(f"{path} has no secret key")
    return public, secret


def _read(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return load_certificate(path)
    except (OSError, ValueError) as error:
        raise KeysError(f"{path} can't be read; `launch keys` makes it ({error})") from error
