"""The clients' socket, and who may connect to it."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from penstock.protocol.config import Config
from penstock.protocol.endpoints import check_reach, stays_on_host
from penstock.protocol.keys import KeysError, admitted_keys
from penstock.protocol.sockets import POLITE_BYTES, Channel, bind
from penstock.services.gateway.monitor import Monitor

log = logging.getLogger(__name__)
MAX_QUEUE = 4096
"""messages in libzmq's queue for one client; what does not fit in waits in the ledger"""
Handlers = list[tuple[Channel[Any], Callable[[], None]]]


def bind_clients(
    context: "zmq.Context[Any]", config: Config, monitor: Monitor
) -> tuple[Channel[Any], Handlers]:
    """The clients' socket, and what must be handled for it. Raises ValueError for an endpoint that
    other machines may reach in the clear, and KeysError."""
    check_reach(config)
    handlers: Handlers = [(monitor.channel, monitor.handle)]
    if config.keys:
        authenticator = Authenticator(context, Path(config.keys))
        handlers.append((authenticator.channel, authenticator.handle))
    elif not stays_on_host(config.endpoint):
        log.warning(
            "--insecure: whoever reaches %s may ask, and whoever sees the network's traffic reads "
            "prompts and answers",
            config.endpoint,
        )
    limit = config.max_request_bytes + POLITE_BYTES
    channel = bind(
        context,
        zmq.ROUTER,
        config.endpoint,
        None,
        limit,
        config.keys,
        max_queue=MAX_QUEUE,
        monitor=monitor.address,
    )
    return channel, handlers


class Authenticator:
    """Answers libzmq's question who may connect (ZAP, ZeroMQ RFC 27): the keys in the folder.

    The folder is read for every new connection, so a key that is added counts at once, and one that
    is removed opens no further connection.
    """

    def __init__(self, context: "zmq.Context[Any]", folder: Path) -> None:
        self.channel = bind(context, zmq.REP, "inproc://zeromq.zap.01", None)
        self._folder = folder

    def handle(self) -> None:
        """Every question that waits. A refused client is told no reason."""
        for version, number, _, address, _, _, key in self.channel.receive_frames():
            accepted = self._admits(z85.encode(key), address)
            status = b"200" if accepted else b"400"
            self.channel.send_frames([version, number, status, b"", b"", b""])

    def _admits(self, key: bytes, address: bytes) -> bool:
        try:
            if key in admitted_keys(self._folder):
                return True
            reason = f"its key {key.decode()} is unknown"
        except KeysError as error:
            reason = str(error)
        self.channel.num_bad_frames += 1  # `launch status` shows it among what was dropped
        if self.channel.num_bad_frames == 1:
            who = address.decode()
            log.warning("refused a client at %s (more are only counted): %s", who, reason)
        return False
