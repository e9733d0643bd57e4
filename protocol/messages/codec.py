"""Frames of messages between clients and the gateway: JSON or MessagePack, after an envelope.

The frames before a request precede every reply to it. A client that sends a number in front of its
request gets each reply in one frame: the number, then the reply. libzmq ends a process that loses
its connection between two frames of one message, if the socket has ZMQ_IMMEDIATE, which our clients
need.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import msgspec
from msgspec import Struct

from penstock.protocol.messages.client import Reply, Request, RequestId

NUMBER_BYTES = 9
_MARK = b"\x01"  # first byte of a number


class RequestKind(Struct):
    """The type of a request, decoded before the rest."""

    type: Literal["generate", "tokenize", "detokenize", "abort", "status"] = "generate"


class RequestName(Struct):
    """The id of a request, decoded alone."""

    request_id: RequestId | None = None


REQUEST_TYPES: dict[str, type[Request]] = {
    one.__struct_config__.tag: one for one in get_args(Request)
}


class Codec:
    """One encoding, with a decoder per type made once."""

    def __init__(self, module: object) -> None:
        self.encode = module.Encoder().encode  # type: ignore[attr-defined]
        self.decode_reply = module.Decoder(Reply).decode  # type: ignore[attr-defined]
        self.decode_any = module.Decoder().decode  # type: ignore[attr-defined]
        self._decode_name = module.Decoder(RequestName).decode  # type: ignore[attr-defined]
        self._decode_kind = module.Decoder(RequestKind).decode  # type: ignore[attr-defined]
        self._decoders = {
            kind: module.Decoder(struct).decode  # type: ignore[attr-defined]
            for kind, struct in REQUEST_TYPES.items()
        }

    def decode_request(self, frame: bytes) -> Request:
        """Decode a request. Raises `msgspec.MsgspecError` or `UnicodeDecodeError`."""
        request: Request = self._decoders[self._decode_kind(frame).type](frame)
        return request

    def request_id(self, frame: bytes) -> str | None:
        """Return the id of a request that may be invalid; None where it has none."""
        try:
            name: RequestName = self._decode_name(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return name.request_id


JSON = Codec(msgspec.json)
MSGPACK = Codec(msgspec.msgpack)


def codec_of(frame: bytes) -> Codec:
    """Return the encoding of a frame, by its first byte."""
    return MSGPACK if frame[:1] >= b"\x80" else JSON


def encode_number(number: int) -> bytes:
    """Return the envelope of a request: NUMBER_BYTES bytes."""
    return _MARK + number.to_bytes(NUMBER_BYTES - 1, "big")


BATCH = encode_number(0)  # in front of a `ReplyBatch`; requests have other numbers


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
