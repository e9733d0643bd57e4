"""Ports for tests."""

import socket


def free_port() -> int:
    """One that the OS has just given and taken back."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
