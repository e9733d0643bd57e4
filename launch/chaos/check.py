"""Comparison of an answer with that of the undisturbed run."""

from msgspec import Struct

from penstock.protocol.messages.client import ErrorReply, FinishReason, GenerateReply


class Expected(Struct, frozen=True):
    """The answer to a request in a pipeline that nobody disturbs."""

    token_ids: list[int]
    text: str
    finish_reason: FinishReason


class Received(Struct):
    """Stream and reply that a client received for one request."""

    is_stream: bool
    reply: GenerateReply | ErrorReply | None = None
    """None: no answer"""
    token_ids: list[int] = []
    """of the pieces of the stream, as the client passes them on"""
    text: str = ""


class Verdict(Struct):
    """Faults of an answer; the defaults are those of a correct one."""

    lost: str = ""
    """why there is no answer"""
    tokens_lost: int = 0
    tokens_doubled: int = 0
    is_torn: bool = False
    """the stream differs from the reply that follows it"""
    is_different: bool = False
    """another token or character than in the undisturbed run"""


def check(received: Received, expected: Expected) -> Verdict:
    """Compare stream and reply with each other and with what they should be.

    Tokens are counted: in a stream that is too short as many are lost, in one that is too long
    doubled. One lost and one doubled in the same stream make it different. Of an aborted request
    there is the beginning: how much is not known.
    """
    reply = received.reply
    if not isinstance(reply, GenerateReply):
        return Verdict(lost=f"{reply.code}: {reply.message}" if reply else "no answer")
    told = (reply.token_ids, reply.text)
    streamed = (received.token_ids, received.text) if received.is_stream else told
    right = (expected.token_ids, expected.text)
    if reply.finish_reason == "abort":
        return Verdict(
            is_torn=not (_begins(told, streamed) or _begins(streamed, told)),
            is_different=not (_begins(right, told) and _begins(right, streamed)),
        )
    lengths = len(told[0]), len(streamed[0])
    return Verdict(
        tokens_lost=max(len(expected.token_ids) - min(lengths), 0),
        tokens_doubled=max(max(lengths) - len(expected.token_ids), 0),
        is_torn=streamed != told,
        is_different=not told == streamed == right or reply.finish_reason != expected.finish_reason,
    )


def _begins(whole: tuple[list[int], str], part: tuple[list[int], str]) -> bool:
    """Return whether the whole begins with the part, tokens and text."""
    return whole[0][: len(part[0])] == part[0] and whole[1].startswith(part[1])
