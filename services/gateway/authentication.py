"""The clients' socket, and who may connect to it."""

import logging
from pathlib import Path
from typing import Any

import zmq

from penstock.protocol.config import Config
from penstock.protocol.transport.channel import Channel
from penstock.protocol.transport.context import Context, check_reach, stays_on_host
from penstock.protocol.transport.curve import ZAP_DOMAIN, secure_server
from penstock.services.gateway import incoming
from penstock.services.gateway.monitor import Monitor

log = logging.getLogger(__name__)
MAX_QUEUE = 4096
"""messages in libzmq's queue for one client; what does not fit in waits in the ledger"""
HANDSHAKE_TIMEOUT = 10_000
"""milliseconds in which a client shows its key"""


def bind_clients(context: Context, config: Config, monitor: Monitor, inner: str) -> Channel[Any]:
    """Return the clients' socket. `inner`: endpoint at which the pipeline's own processes are
    clients. Raises ValueError for an endpoint that other machines may reach in the clear;
    zmq.ZMQError, which names the address, if it is taken; KeysError."""
    check_reach(config)
    if config.keys:
        context.admit(ZAP_DOMAIN, Path(config.keys))
    elif not stays_on_host(config.endpoint):
        log.warning(
            "--insecure: whoever reaches %s may ask, and whoever sees the network's traffic reads "
            "prompts and answers",
            config.endpoint,
        )
    # Our own processes are clients at an endpoint of their own. What has no keys is bound first.
    is_inner_first = bool(config.keys) or not context.node_id
    channel = context.bind(
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
        monitor.inner = channel.last_endpoint
        if config.keys:
            secure_server(channel.socket, Path(config.keys))
        channel.socket.setsockopt(zmq.HEARTBEAT_IVL, 0)
        channel.socket.setsockopt(zmq.IPV6, "[" in config.endpoint)
        context.bind_also(channel, config.endpoint)
    else:
        context.bind_also(channel, inner)
        monitor.inner = channel.last_endpoint
    return channel
