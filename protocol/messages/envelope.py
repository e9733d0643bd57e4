"""The frames before a request, which precede every reply to it.

A client that sends a number in front of its request gets each reply in one frame: the number, then
the reply. libzmq ends a process that loses its connection between two frames of one message, if the
socket has ZMQ_IMMEDIATE, which our clients need.
"""

from collections.abc import Sequence

NUMBER_BYTES = 9
_MARK = b"\x01"
"""first byte of a number"""


def encode_number(number: int) -> bytes:
    """Return the envelope of a request: NUMBER_BYTES bytes."""
    return _MARK + number.to_bytes(NUMBER_BYTES - 1, "big")


BATCH = encode_number(0)
"""in front of a `ReplyBatch`; requests have other numbers"""


def has_number(envelope: Sequence[bytes]) -> bool:
    """Return whether the frames after the peer's identity are one number."""
    return len(envelope) == 2 and len(envelope[1]) == NUMBER_BYTES and envelope[1][:1] == _MARK


def reply_frames(envelope: Sequence[bytes], reply: bytes) -> list[bytes]:
    """Return the frames of an encoded reply; the envelope begins with the peer's identity."""
    if has_number(envelope):
        return [envelope[0], envelope[1] + reply]
    return [*envelope, reply]


def split_reply(frames: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Return the number and the encoded reply."""
    data = b"".join(frames)  # earlier gateways send two frames
    return data[:NUMBER_BYTES], data[NUMBER_BYTES:]
