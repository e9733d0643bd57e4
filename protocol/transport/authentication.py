"""Who may connect to the sockets that speak CURVE."""

import logging
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from penstock.protocol.transport.channel import bind
from penstock.protocol.transport.curve import KeysError, admitted_keys

log = logging.getLogger(__name__)


class Authenticator:
    """Answers libzmq's question who may connect (ZAP, ZeroMQ RFC 27): the keys in the folder
    of the socket's domain.

    The folder is read for every new connection, so a key that is added counts at once, and one that
    is removed opens no further connection.
    """

    def __init__(self, context: "zmq.Context[Any]", folders: dict[bytes, Path]) -> None:
        """folders: of keys, by domain; more may come."""
        self.channel = bind(context, zmq.REP, "inproc://zeromq.zap.01", None)
        self.folders = folders

    def handle(self) -> None:
        """Every question that waits. A refused client is told no reason."""
        for version, number, domain, address, _, _, key in self.channel.receive_frames():
            accepted = self._admits(domain, z85.encode(key), address)
            status = b"200" if accepted else b"400"
            self.channel.send_frames([version, number, status, b"", b"", b""])

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
            log.warning("refused a client at %s (more are only counted): %s", who, reason)
        return False
