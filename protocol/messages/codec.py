"""The two encodings of messages between clients and the gateway: JSON and MessagePack."""

from typing import Literal, get_args

import msgspec
from msgspec import Struct

from penstock.protocol.messages.client import Reply, Request


class RequestKind(Struct):
    """The type of a request, decoded before the rest."""

    type: Literal["generate", "tokenize", "detokenize", "abort", "status"] = "generate"


REQUEST_TYPES: dict[str, type[Request]] = {
    one.__struct_config__.tag: one for one in get_args(Request)
}


class Codec:
    """One encoding, with a decoder per type made once."""

    def __init__(self, module: object) -> None:
        self.encode = module.Encoder().encode  # type: ignore[attr-defined]
        self.decode_reply = module.Decoder(Reply).decode  # type: ignore[attr-defined]
        self.decode_any = module.Decoder().decode  # type: ignore[attr-defined]
        self._decode_kind = module.Decoder(RequestKind).decode  # type: ignore[attr-defined]
        self._decoders = {
            kind: module.Decoder(struct).decode  # type: ignore[attr-defined]
            for kind, struct in REQUEST_TYPES.items()
        }

    def decode_request(self, frame: bytes) -> Request:
        """Decode a request. Raises `msgspec.MsgspecError` or `UnicodeDecodeError`."""
        request: Request = self._decoders[self._decode_kind(frame).type](frame)
        return request


JSON = Codec(msgspec.json)
MSGPACK = Codec(msgspec.msgpack)


def codec_of(frame: bytes) -> Codec:
    """Return the encoding of a frame, by its first byte."""
    return MSGPACK if frame[:1] >= b"\x80" else JSON
