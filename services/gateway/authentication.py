"""The clients' socket, and who may connect to it."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from penstock.protocol.authentication import Authenticator
from penstock.protocol.cluster import Cluster
from penstock.protocol.config import Config
from penstock.protocol.endpoints import check_reach, inner_clients, stays_on_host
from penstock.protocol.keys import ZAP_DOMAIN, secure_server
from penstock.protocol.sockets import Channel, bind
from penstock.services.gateway import incoming
from penstock.services.gateway.monitor import Monitor

log = logging.getLogger(__name__)
MAX_QUEUE = 4096
"""messages in libzmq's queue for one client; what does not fit in waits in the ledger"""
HANDSHAKE_TIMEOUT = 10_000
"""milliseconds in which a client shows its key"""
Handlers = list[tuple[Channel[Any], Callable[[], None]]]


def bind_clients(
    context: "zmq.Context[Any]", config: Config, monitor: Monitor
) -> tuple[Channel[Any], Handlers]:
    """The clients' socket, and what must be handled for it. Raises ValueError for an endpoint that
    other machines may reach in the clear, and KeysError."""
    check_reach(config)
    handlers: Handlers = [(monitor.channel, monitor.handle)]
    if config.keys and isinstance(context, Cluster):
        context.authenticator.folders[ZAP_DOMAIN] = Path(config.keys)
    elif config.keys:
        authenticator = Authenticator(context, {ZAP_DOMAIN: Path(config.keys)})
        handlers.append((authenticator.channel, authenticator.handle))
    elif not stays_on_host(config.endpoint):
        log.warning(
            "--insecure: whoever reaches %s may ask, and whoever sees the network's traffic reads "
            "prompts and answers",
            config.endpoint,
        )
    # On a cluster our own processes are clients elsewhere. What has no keys is bound first.
    inner = inner_clients(config)
    is_inner_first = isinstance(context, Cluster) and bool(config.keys)
    channel = bind(
        context,
        zmq.ROUTER,
        inner if is_inner_first else config.endpoint,
        None,
        incoming.max_frame_bytes(config),
        "" if is_inner_first else config.keys,
        options={
            int(zmq.SNDHWM): MAX_QUEUE,
            int(zmq.RCVHWM): incoming.MAX_QUEUE,
            int(zmq.HANDSHAKE_IVL): HANDSHAKE_TIMEOUT,
        },
        monitor=monitor.address,
    )
    if is_inner_first:
        secure_server(channel.socket, Path(config.keys))
        channel.socket.setsockopt(zmq.HEARTBEAT_IVL, 0)
        channel.socket.setsockopt(zmq.IPV6, "[" in config.endpoint)
        channel.socket.bind(config.endpoint)
    elif isinstance(context, Cluster):
        context.bind(channel.socket, inner)
    return channel, handlers
