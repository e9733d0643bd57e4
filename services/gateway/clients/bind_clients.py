"""The endpoints at which clients connect, and the options of their socket."""

import logging
from pathlib import Path
from typing import Any

import zmq

from penstock.protocol.transport.channel import Channel
from penstock.protocol.transport.context import ZAP_DOMAIN, secure_server, stays_on_host
from penstock.protocol.transport.process import Process

log = logging.getLogger("gateway")
# messages of one client that libzmq receives ahead; then the client has to wait
MAX_RECEIVE_QUEUE = 8
# messages in libzmq's queue for one client; further output waits in the ledger
MAX_SEND_QUEUE = 4096
OPTIONS = {
    zmq.HANDSHAKE_IVL: 10_000,  # milliseconds in which a client shows its key
    zmq.RCVHWM: MAX_RECEIVE_QUEUE,
    # The connection of a machine that has vanished ends after 25 s: until then its client can't
    # reconnect with the same ZeroMQ identity.
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 10,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 3,
}


def bind_clients(
    process: Process, monitor: str, max_frame_bytes: int
) -> tuple[Channel[Any], bytes]:
    """Return the clients' socket, and its endpoint without keys as bound. Raises as `bind`.

    That endpoint is for the pipeline's own processes. monitor: receives events of connections.
    """
    context, config, inner = process.context, process.config, process.endpoints.inner_clients
    if config.curve_keys:
        context.admit(ZAP_DOMAIN, Path(config.curve_keys))
    elif not stays_on_host(config.endpoint):
        log.warning(
            "--insecure: anybody who reaches %s may send requests, and anybody who sees the "
            "network's traffic reads prompts and answers",
            config.endpoint,
        )
    # Our own processes are clients at an endpoint of their own. The one without keys is first.
    is_inner_first = bool(config.curve_keys) or not context.node_id
    endpoint = inner if is_inner_first else config.endpoint
    options = {int(option): value for option, value in OPTIONS.items()}
    options[zmq.SNDHWM] = MAX_SEND_QUEUE
    channel: Channel[Any] = context.bind(
        zmq.ROUTER, endpoint, None, max_frame_bytes, options, monitor
    )
    if not is_inner_first:
        context.bind_also(channel, inner)
        return channel, channel.last_endpoint
    bound = channel.last_endpoint
    if config.curve_keys:
        secure_server(channel.socket, Path(config.curve_keys))
    channel.socket.setsockopt(zmq.HEARTBEAT_IVL, 0)
    channel.socket.setsockopt(zmq.IPV6, "[" in config.endpoint)
    context.bind_also(channel, config.endpoint)
    return channel, bound
