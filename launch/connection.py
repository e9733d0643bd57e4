"""A client's connection to the gateway, which may be lost and come back."""

import contextlib

import zmq
from zmq.utils.monitor import recv_monitor_message

from penstock.launch.session import Answer, Session
from penstock.protocol.client import Request


class Connection:
    """A DEALER socket, the monitor that tells when it is connected, and what was asked on it.

    Every question is asked once on each connection until it is answered: the gateway that sits at
    the end of a new one has perhaps not heard of it.
    """

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._session = Session()
        self._is_connected = False
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)  # what a lost connection has queued is dropped
        self.monitor = self.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        # "*" is every interface to a server, and no address to a client
        self.socket.connect(endpoint.replace("://*:", "://127.0.0.1:"))

    def ask(self, question: Request) -> Answer:
        """Sends a question, now or when there is a connection."""
        self.take()
        answer = self._session.ask(question)
        if self._is_connected:
            self._send(answer)
        self.take()  # ZeroMQ signals changes, and the send may have swallowed one
        return answer

    def take(self) -> None:
        """Takes in everything that has come, and does not wait."""
        while True:
            if self.monitor.poll(0):
                self._on_event(recv_monitor_message(self.monitor)["event"])
            elif self.socket.poll(0):
                self._session.receive(self.socket.recv_multipart())
            else:
                return

    def close(self) -> None:
        """Sends what is queued: waits for it, for a second at most."""
        self.socket.disable_monitor()
        self.monitor.close()
        self.socket.close()
        self._context.term()

    def _on_event(self, event: int) -> None:
        self._is_connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if self._is_connected:
            for answer in self._session.unanswered():
                self._send(answer)

    def _send(self, answer: Answer) -> None:
        with contextlib.suppress(zmq.Again):  # the connection is lost; the next one will do
            self.socket.send_multipart(answer.frames, zmq.DONTWAIT)
