"""Messages by which processes register with and leave one another."""

from msgspec import Struct

PROTOCOL_VERSION = 13
"""of the messages in this folder; those that register a process carry it"""


class Heartbeat(Struct, tag=True):
    """A tokenizer or detokenizer lives. The first one registers it, so none is needed beside."""

    name: str
    version: int = PROTOCOL_VERSION


class Refused(Struct, tag=True):
    """To a tokenizer or detokenizer that can't take part: it leaves, saying why."""

    reason: str


class Goodbye(Struct, tag=True):
    """A tokenizer or detokenizer stops: what it holds goes to another one."""
