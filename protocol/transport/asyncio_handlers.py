"""Handlers of channels within asyncio."""

import asyncio

import zmq

from penstock.protocol.transport.context import Handlers, drain


def attend(handlers: Handlers) -> None:
    """Handle messages in the running asyncio loop from now on, until `leave`."""
    loop = asyncio.get_running_loop()
    for channel, _ in handlers:
        loop.add_reader(int(channel.socket.getsockopt(zmq.FD)), drain, handlers)
    drain(handlers)


def leave(handlers: Handlers) -> None:
    """End what `attend` began, while the sockets are open."""
    loop = asyncio.get_running_loop()
    for channel, _ in handlers:
        loop.remove_reader(int(channel.socket.getsockopt(zmq.FD)))
