"""Checks of processes that register themselves."""

import logging

from penstock.protocol.messages.registration import PROTOCOL_VERSION, Heartbeat
from penstock.protocol.messages.worker import WorkerState

log = logging.getLogger(__name__)


def refusal(message: Heartbeat | WorkerState) -> str | None:
    """Return, and log, why the process that registers itself can't take part; None if it can."""
    if message.version == PROTOCOL_VERSION:
        return None
    reason = (
        f"{message.name} speaks version {message.version} of the protocol; "
        f"this pipeline speaks version {PROTOCOL_VERSION}"
    )
    log.warning("refused: %s", reason)
    return reason
