"""Checks of processes that register themselves."""

from penstock.protocol.messages import PROTOCOL_VERSION, Heartbeat, WorkerHello


def refusal(message: Heartbeat | WorkerHello) -> str | None:
    """Why the process that registers itself can't take part; None if it can."""
    if message.version == PROTOCOL_VERSION:
        return None
    return (
        f"{message.name} speaks version {message.version} of the protocol; "
        f"this pipeline speaks version {PROTOCOL_VERSION}"
    )
