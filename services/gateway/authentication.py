"""The clients' socket, and who may connect to it."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from penstock.protocol.config import Config
from penstock.protocol.transport.authentication import Authenticator
from penstock.protocol.transport.channel import Channel, bind, bind_also, last_endpoint
from penstock.protocol.transport.curve import ZAP_DOMAIN, secure_server
from penstock.protocol.transport.discovery import Cluster
from penstock.protocol.transport.endpoints import check_reach, stays_on_host
from penstock.services.gateway import incoming
from penstock.services.gateway.monitor import Monitor

log = logging.getLogger(__name__)
MAX_QUEUE = 4096
"""messages in libzmq's queue for one client; what does not fit in waits in the ledger"""
HANDSHAKE_TIMEOUT = 10_000
"""milliseconds in which a client shows its key"""
Handlers = list[tuple[Channel[Any], Callable[[], None]]]


def bind_clients(
    context: "zmq.Context[Any]", config: Config, monitor: Monitor, inner: str
) -> tuple[Channel[Any], Handlers]:
    """The clients' socket, and what must be handled for it. `inner`: where the pipeline's own
    processes are clients. Raises ValueError for an endpoint that other machines may reach in the
    clear, zmq.ZMQError with an address that is taken, and KeysError."""
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
    # Our own processes are clients at an endpoint of their own. What has no keys is bound first.
    is_inner_first = bool(config.keys) or not isinstance(context, Cluster)
    channel = bind(
        context,
        zmq.ROUTER,
        inner if is_inner_first else config.endpoint,
        None,
        incoming.max_frame_bytes(config),
        options={
            int(zmq.SNDHWM): MAX_QUEUE,
            int(zmq.RCVHWM): incoming.MAX_QUEUE,
            int(zmq.HANDSHAKE_IVL): HANDSHAKE_TIMEOUT,
        },
        monitor=monitor.address,
    )
    if is_inner_first:
        monitor.inner = last_endpoint(channel)
        if config.keys:
            secure_server(channel.socket, Path(config.keys))
        channel.socket.setsockopt(zmq.HEARTBEAT_IVL, 0)
        channel.socket.setsockopt(zmq.IPV6, "[" in config.endpoint)
        bind_also(channel, config.endpoint)
    elif isinstance(context, Cluster):
        context.bind(channel.socket, inner)
        monitor.inner = last_endpoint(channel)
    return channel, handlers
