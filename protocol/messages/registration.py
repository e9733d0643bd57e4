"""Messages by which processes register with and leave one another."""

import logging

from msgspec import Struct

log = logging.getLogger(__name__)
PROTOCOL_VERSION = 15  # of the messages in this folder; those that register a process carry it


class Heartbeat(Struct, tag=True):
    """Tokenizer → gateway, detokenizer → scheduler: it is alive. The first one registers it."""

    name: str
    version: int = PROTOCOL_VERSION


class Refused(Struct, tag=True):
    """To a tokenizer or detokenizer of another protocol version: it exits with the reason."""

    reason: str


class Goodbye(Struct, tag=True):
    """From a tokenizer or detokenizer that stops: its work moves to another one."""


def refusal(name: str, version: int) -> str | None:
    """Return, and log, why a process that registers is refused; None if it is not."""
    if version == PROTOCOL_VERSION:
        return None
    reason = (
        f"{name} speaks version {version} of the protocol; "
        f"this pipeline speaks version {PROTOCOL_VERSION}"
    )
    log.warning("refused: %s", reason)
    return reason
