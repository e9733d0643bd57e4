"""CURVE keys: the folder that `launch keys` makes, and the sockets that use it.

    server.key           public key of the gateway: every client has it
    server.key_secret    secret key of the gateway: stays with it
    clients/NAME.key     public keys of the clients that the gateway lets in
    NAME.key_secret      secret key of one client, which needs this file and `server.key` only

Each file is a certificate of `zmq.auth`.
"""

from pathlib import Path
from typing import Any

import zmq
from zmq.auth import load_certificate, load_certificates

SERVER = "server"
CLIENTS = "clients"
ZAP_DOMAIN = b"clients"


class KeysError(ValueError):
    """Keys that can't be read: which file, and why."""


def secure_server(socket: "zmq.Socket[Any]", folder: Path, domain: bytes = ZAP_DOMAIN) -> None:
    """Lets a socket, yet to be bound, speak CURVE only. Raises KeysError.

    The domain is enforced: where nobody answers for it, libzmq lets nobody in. Without this it
    would let everybody in.
    """
    socket.curve_secretkey = _secret_key(folder, SERVER)[1]
    socket.curve_server = True
    socket.setsockopt(zmq.ZAP_DOMAIN, domain)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def secure_client(socket: "zmq.Socket[Any]", folder: Path, client: str) -> None:
    """Lets a socket, yet to be connected, speak CURVE as `client`. Raises KeysError."""
    socket.curve_publickey, socket.curve_secretkey = _secret_key(folder, client)
    socket.curve_serverkey = _read(folder / f"{SERVER}.key")[0]


def admitted_keys(folder: Path) -> set[bytes]:
    """The public keys, in Z85, of the clients that are let in. Raises KeysError."""
    try:
        return set(load_certificates(folder / CLIENTS))
    except (OSError, ValueError) as error:
        raise KeysError(str(error)) from error


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
