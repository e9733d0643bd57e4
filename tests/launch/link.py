"""A connection that can be cut without a sign to its ends."""

import contextlib
import socket
import threading
from collections.abc import Callable

HOST = "127.0.0.1"


class Link(contextlib.ExitStack):
    """Link between a client and a gateway; once it is cut, both receive nothing.

    ZeroMQ can't know that `0.0.0.0` is this machine.
    """

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port
        self._is_cut = False
        self._server = self.enter_context(socket.create_server((HOST, 0)))
        self.endpoint = f"tcp://0.0.0.0:{self._server.getsockname()[1]}"
        self._start(self._accept)
        self.callback(self._server.shutdown, socket.SHUT_RDWR)

    def cut(self) -> None:
        self._is_cut = True

    def _start(self, function: Callable[..., None], *arguments: socket.socket) -> None:
        thread = threading.Thread(target=function, args=arguments)
        thread.start()
        self.callback(thread.join)

    def _accept(self) -> None:
        near = self.enter_context(self._server.accept()[0])
        far = self.enter_context(socket.create_connection((HOST, self._port)))
        self._start(self._pass_on, near, far)
        self._start(self._pass_on, far, near)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(1 << 16):
            if not self._is_cut:
                target.sendall(data)
