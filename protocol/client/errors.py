"""Exceptions that clients raise.

ClientError
├── RequestError      the pipeline refused a request, or failed at it
└── NoAnswer          nothing arrived within the client's timeout
"""

from penstock.protocol.messages.client import ErrorReply


class ClientError(Exception):
    """The root of all exceptions of a client."""


class RequestError(ClientError):
    """The pipeline refused a request, or failed at it.

    `code` is `invalid`, `overloaded` or `failed`; `field` names the invalid field. `overloaded` has
    `retry_after`, the number of seconds after which a retry may succeed. A prompt that doesn't fit
    into the context has `too_long`: its tokens, and how many fit.
    """

    def __init__(self, reply: ErrorReply) -> None:
        super().__init__(reply.message)
        self.code = reply.code
        self.message = reply.message
        self.field = reply.field
        self.request_id = reply.request_id
        self.retry_after = reply.retry_after
        self.too_long = reply.too_long


class NoAnswer(ClientError):  # noqa: N818  `TimeoutError` is taken, and says less
    """Nothing arrived from the pipeline within the client's timeout."""
