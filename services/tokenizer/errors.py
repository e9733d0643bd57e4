"""The refusal of a prompt, and the reply that reports it."""

import logging

from penstock.protocol.messages.client import ErrorReply

log = logging.getLogger("tokenizer")
DEFECT = "a defect of the server: the request can't be tokenized; its log says more"


class PromptError(ValueError):
    """A prompt that can't be served: which field, and why; too_long: as in ErrorReply."""

    def __init__(self, field: str, message: str, too_long: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.too_long = too_long


def error_reply(error: Exception) -> ErrorReply:
    """Return the reply for an exception, in an `except` block; except PromptError, a defect."""
    if isinstance(error, PromptError):
        return ErrorReply(
            code="invalid", message=str(error), field=error.field, too_long=error.too_long
        )
    log.exception("a request can't be tokenized")
    return ErrorReply(code="failed", message=DEFECT)
