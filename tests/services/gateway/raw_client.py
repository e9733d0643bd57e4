"""A client that writes ZMTP itself, and so may write what libzmq does not."""

import socket
import struct

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
MORE = 1


def property_of(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


def frame(body: bytes, flags: int = 0) -> bytes:
    if len(body) > 255:
        return bytes([flags | 2]) + struct.pack(">Q", len(body)) + body
    return bytes([flags, len(body)]) + body


class RawClient:
    """A DEALER socket."""

    def __init__(self, endpoint: str, identity: bytes = b"", handshake: bool = True) -> None:
        scheme, _, address = endpoint.partition("://")
        if scheme == "ipc":
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.connect(address)
        else:
            host, _, port = address.rpartition(":")
            self.socket = socket.create_connection((host, int(port)))
        if handshake:
            ready = b"\x05READY" + property_of(b"Socket-Type", b"DEALER")
            ready += property_of(b"Identity", identity)
            self.socket.sendall(GREETING + bytes([4, len(ready)]) + ready)
            heard = b""
            while b"READY" not in heard:  # of libzmq's I/O thread; before it nothing may follow
                heard += self.socket.recv(1 << 16)
        self.socket.setblocking(False)

    @property
    def is_closed(self) -> bool:
        """The gateway has ended the connection."""
        try:
            while self.socket.recv(1 << 16):
                pass
        except BlockingIOError:
            return False
        except ConnectionError:
            pass
        return True

    def send_some(self, data: bytes) -> int:
        """Send as much as there is room for: how many bytes."""
        try:
            return self.socket.send(data)
        except BlockingIOError:
            return 0
        except ConnectionError:
            return len(data)

    def send(self, data: bytes) -> None:
        self.socket.setblocking(True)
        self.socket.sendall(data)
        self.socket.setblocking(False)
