"""Messages between the supervisor and its fork server, one request at a time."""

from msgspec import Struct


class ForkRequest(Struct, array_like=True):
    """Supervisor → fork server: fork a process. Its descriptors come with the message.

    The first descriptor is the process's standard output and error.
    """

    service: str
    environment: dict[str, str]
    """changes to the fork server's own"""
    inherited: list[str]
    """environment variables that hold the numbers of the other descriptors"""


class Forked(Struct, array_like=True):
    """Forked process → supervisor; and the fork server itself, when it is ready or can't fork."""

    pid: int = 0
    """0: the fork server is ready, or no process was forked"""
