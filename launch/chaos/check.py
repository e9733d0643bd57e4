"""Comparison of an answer with that of the undisturbed run."""

from typing import Any

from msgspec import Struct, field

from penstock.protocol.messages.client import ErrorReply, GenerateReply

NO_ANSWER = "no answer"


class Content(Struct):
    """An answer in the form in which it is compared: sequences by name, and its end."""

    parts: dict[str, Any] = {}  # list or str by name: `tokens`, `text`, `0.content`, `0.logprobs`
    finish: Any = None

    @property
    def num_tokens(self) -> int:
        """Tokens, or characters of all parts of an answer whose tokens are not known."""
        if "tokens" in self.parts:
            return len(self.parts["tokens"])
        return sum(len(part) for part in self.parts.values() if isinstance(part, str))

    def extend(self, name: str, more: list[Any] | str) -> None:
        """Append to a part; a missing one begins."""
        if more:
            self.parts[name] = self.parts.get(name, more[:0]) + more

    def begins(self, whole: "Content") -> bool:
        """Return whether each part is the beginning of that of another answer."""
        return all(
            whole.parts.get(name, part[:0])[: len(part)] == part
            for name, part in self.parts.items()
        )


class Received(Struct):
    """Stream and reply that a client received for one request."""

    is_stream: bool
    streamed: Content = field(default_factory=Content)
    reply: Content | None = None  # None: no answer yet
    error: str = ""  # why the request failed
    is_aborted: bool = False

    @property
    def is_over(self) -> bool:
        return self.reply is not None or bool(self.error)

    def finish(self, reply: GenerateReply | ErrorReply) -> None:
        """Set the reply of the gateway."""
        if isinstance(reply, ErrorReply):
            self.error = f"{reply.code}: {reply.message}"
        else:
            self.reply = content_of(reply)
            self.is_aborted = reply.finish_reason == "abort"


class Verdict(Struct):
    """Faults of an answer; the defaults are those of a correct one."""

    lost: str = ""  # why there is no answer
    tokens_lost: int = 0
    tokens_doubled: int = 0
    is_torn: bool = False  # the stream differs from the reply that follows it
    is_different: bool = False  # another token, character or number than undisturbed


def content_of(reply: GenerateReply) -> Content:
    """Return the content of a reply of the gateway."""
    parts = {
        "tokens": reply.token_ids,
        "text": reply.text,
        "logprobs": reply.logprobs,
        "prompt_logprobs": reply.prompt_logprobs,
        "pooled": reply.pooled,
    }
    given = {name: part for name, part in parts.items() if part is not None}
    return Content(given, (reply.finish_reason, reply.stop_reason))


def check(received: Received, expected: Content) -> Verdict:
    """Compare stream and reply with each other and with what they should be.

    Tokens are counted: in a stream that is too short as many are lost, in one that is too long
    doubled. One lost and one doubled in the same stream make it different. An aborted request
    has the beginning of its answer: how much is not known.
    """
    reply = received.reply
    if reply is None:
        return Verdict(lost=received.error or NO_ANSWER)
    streamed = received.streamed if received.is_stream else reply
    if received.is_aborted:
        return Verdict(
            is_torn=not (reply.begins(streamed) or streamed.begins(reply)),
            is_different=not (reply.begins(expected) and streamed.begins(expected)),
        )
    lengths = reply.num_tokens, streamed.num_tokens
    return Verdict(
        tokens_lost=max(expected.num_tokens - min(lengths), 0),
        tokens_doubled=max(max(lengths) - expected.num_tokens, 0),
        is_torn=not _agree(streamed, reply),
        is_different=reply != expected or not _agree(streamed, expected),
    )


def _agree(streamed: Content, whole: Content) -> bool:
    """Return whether a stream says the whole answer.

    Prompt logprobs and pooled numbers are in replies only.
    """
    parts = streamed.parts
    return (
        all(
            part == parts.get(name, part[:0])
            for name, part in whole.parts.items()
            if name not in ("prompt_logprobs", "pooled")
        )
        and parts.keys() <= whole.parts.keys()
    )
