"""Messages about memory that outlives the process that made it; the supervisor keeps descriptors.

A process sends one message at a time over its own socket pair and waits for the reply.
"""

from msgspec import Struct


class TakeMemory(Struct, tag=True):
    """Process → supervisor: pass on the memory of this name, once its last user has exited."""

    name: str
    shares: bool = False
    """at once, beside its user: it may only be read, and is taken before it is written"""


class KeepMemory(Struct, tag=True):
    """Process → supervisor: keep this memory, whose descriptor comes with the message."""

    name: str
    manifest: bytes
    """the contents, for the process that takes the memory"""


class DropMemory(Struct, tag=True):
    """Process → supervisor: close the memory of this name."""

    name: str


class MemoryReply(Struct, tag=True):
    """Supervisor → process; the descriptor of memory that was taken comes with the message."""

    manifest: bytes = b""
    """empty if no memory has this name"""


ToMemoryServer = TakeMemory | KeepMemory | DropMemory
