"""A gateway that floods a client."""

import threading
from collections.abc import Callable

from penstock.protocol.messages.client import (
    AbortRequest,
    GenerateRequest,
    Reply,
    Request,
    TextDelta,
)
from tests.services.http.conftest import behave


def flood(is_aborted: threading.Event) -> Callable[[Request], list[Reply]]:
    """Return the answers of a gateway: 20 MB to a stream; an abort sets `is_aborted`."""
    text = "x" * 10_000

    def answer(request: Request) -> list[Reply]:
        match request:
            case GenerateRequest(stream=True, request_id=str(name)):
                return [
                    TextDelta(
                        request_id=name,
                        token_offset=number,
                        char_offset=number * len(text),
                        token_ids=[1],
                        text=text,
                    )
                    for number in range(2000)
                ]
            case AbortRequest():
                is_aborted.set()
        return behave(request)

    return answer
