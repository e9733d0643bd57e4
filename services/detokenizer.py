"""The detokenizer: token ids to text, as they come.

The text of a request is a pure function of its token ids, so any detokenizer can go on with it.
"""

from codecs import getincrementaldecoder
from pathlib import Path
from typing import Any

import msgspec
import zmq
from msgspec import Struct

from penstock.protocol.checkpoint import ModelError
from penstock.protocol.client import FinishReason, TextDelta
from penstock.protocol.messages import (
    Goodbye,
    Heartbeat,
    Refused,
    StopFound,
    StreamOpened,
    TextDeltas,
    ToDetokenizer,
    TokenDelta,
)
from penstock.protocol.plan import unpack
from penstock.protocol.process import Loop, Process, PulseSender
from penstock.protocol.sockets import connect

Utf8Decoder = getincrementaldecoder("utf-8")


class _AddedToken(Struct):
    id: int
    content: str
    special: bool


class _Bpe(Struct):
    vocab: dict[str, int]


class _TokenizerFile(Struct):
    """The parts of a `tokenizer.json` that tell the bytes of every token."""

    decoder: dict[str, Any]
    model: _Bpe
    added_tokens: list[_AddedToken] = []


def _byte_alphabet() -> dict[str, int]:
    """The character that byte-level BPE writes for each byte (GPT-2, encoder.py)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


def token_bytes(folder: Path) -> dict[int, bytes]:
    """The bytes of every token by id; special tokens have none.

    Raises ModelError if the tokenizer is not a byte-level one.
    """
    path = folder / "tokenizer.json"
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile)
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{path} can't be read: {error}") from error
    kinds = [part["type"] for part in file.decoder.get("decoders", [file.decoder])]
    if "ByteLevel" not in kinds:
        raise ModelError(f"{path} has decoder {kinds}; ByteLevel is served")
    alphabet = _byte_alphabet()
    table = {
        token_id: bytes(alphabet[character] for character in token)
        for token, token_id in file.model.vocab.items()
        if alphabet.keys() >= set(token)
    }
    for token in file.added_tokens:
        table[token.id] = b"" if token.special else token.content.encode()
    return table


class TextStream:
    """The text of one request, held back while it may be half a character or a stop string."""

    def __init__(self, opened: StreamOpened, table: dict[int, bytes]) -> None:
        self.request_id = opened.request_id
        self.attempt = opened.attempt
        self._prompt_tokens = opened.prompt_tokens
        self._cached_tokens = opened.cached_tokens
        self._table = table
        self._stop = opened.stop
        self._max_held = max((len(stop) - 1 for stop in opened.stop), default=0)
        self._decoder = Utf8Decoder("replace")
        for token_id in unpack(opened.prompt_tail):  # may end within a character
            self._decoder.decode(table.get(token_id, b""))
        self._num_tokens = 0
        self._num_chars = 0
        self._held = ""
        self.stopped = False
        """a stop string was found: the text is complete"""

    def feed(self, token_ids: list[int]) -> TextDelta:
        """The text that these tokens add; those behind a stop string are dropped.

        One token after the other, so that the text does not depend on how they came.
        """
        offset, text = self._num_tokens, ""
        for token_id in token_ids:
            self._num_tokens += 1
            text += self._release(self._decoder.decode(self._table.get(token_id, b"")))
            if self.stopped:
                break
        return self._delta(offset, token_ids[: self._num_tokens - offset], text)

    def end(self, reason: FinishReason) -> TextDelta:
        """What was held back comes out."""
        text = self._held + self._decoder.decode(b"", final=True)
        return self._delta(self._num_tokens, [], text, reason)

    def _delta(
        self, offset: int, token_ids: list[int], text: str, reason: FinishReason | None = None
    ) -> TextDelta:
        delta = TextDelta(
            request_id=self.request_id,
            token_offset=offset,
            char_offset=self._num_chars,
            token_ids=token_ids,
            text=text,
            finish_reason="stop" if self.stopped else reason,
            attempt=self.attempt,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
        )
        self._num_chars += len(text)
        return delta

    def _release(self, text: str) -> str:
        """`text` and what was held, less what may become a stop string."""
        if not self._stop:
            return text
        text = self._held + text
        found = [at for at in map(text.find, self._stop) if at >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._max_held, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0


class Detokenizer:
    """All streams of one detokenizer; no sockets."""

    def __init__(self, table: dict[int, bytes]) -> None:
        self._table = table
        self._streams: dict[int, TextStream] = {}
        self._epoch = 0

    def handle(self, message: TokenDelta) -> tuple[list[TextDelta], list[StopFound]]:
        """The texts that a step brings, and the requests that a stop string ended."""
        if message.epoch > self._epoch:  # another scheduler: it opens its streams anew
            self._epoch = message.epoch
            self._streams.clear()
        if message.epoch < self._epoch:
            return [], []
        for stream_id in message.closed:
            self._streams.pop(stream_id, None)
        deltas: list[TextDelta] = []
        stops: list[StopFound] = []
        for opened in message.opened:
            self._streams[opened.stream_id] = TextStream(opened, self._table)
            self._feed(opened.stream_id, list(unpack(opened.output_token_ids)), deltas, stops)
            if opened.finish_reason:
                self._end(opened.stream_id, opened.finish_reason, deltas)
        stream_ids, token_ids = unpack(message.stream_ids), unpack(message.token_ids)
        for stream_id, token_id in zip(stream_ids, token_ids, strict=True):
            self._feed(stream_id, [token_id], deltas, stops)
        for stream_id, reason in message.finished:
            self._end(stream_id, reason, deltas)
        return deltas, stops

    def _feed(
        self, stream_id: int, token_ids: list[int], deltas: list[TextDelta], stops: list[StopFound]
    ) -> None:
        stream = self._streams.get(stream_id)
        if stream is None:  # ended by a stop string; the scheduler does not know yet
            return
        deltas.append(stream.feed(token_ids))
        if stream.stopped:
            stops.append(StopFound(stream.request_id, stream.attempt))
            del self._streams[stream_id]

    def _end(self, stream_id: int, reason: FinishReason, deltas: list[TextDelta]) -> None:
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            deltas.append(stream.end(reason))


class DetokenizerProcess:
    """Sockets around `Detokenizer`."""

    def __init__(self, process: Process) -> None:
        self.name = process.name
        self.detokenizer = Detokenizer(token_bytes(process.config.model_folder))
        context, at = process.context, process.endpoints
        self.tokens = connect(context, zmq.DEALER, at.detokenizers, ToDetokenizer, process.identity)
        self.scheduler = connect(context, zmq.PUSH, at.requests)
        self.gateway = connect(context, zmq.PUSH, at.results)
        self.loop = Loop(self.on_heartbeat, PulseSender(process))
        self.loop.add(self.tokens, self.on_tokens)
        self.loop.add_connection(self.tokens, self.on_heartbeat)

    def on_tokens(self) -> None:
        """New tokens of any number of streams."""
        for _, message in self.tokens.receive():
            if isinstance(message, Refused):
                raise SystemExit(message.reason)
            deltas, stops = self.detokenizer.handle(message)
            if deltas:
                self.gateway.send(TextDeltas(deltas))
            for stop in stops:
                self.scheduler.send(stop)

    def on_heartbeat(self) -> None:
        """Registers this process with the scheduler, and keeps it registered."""
        self.tokens.send(Heartbeat(self.name))


def main() -> None:
    """Runs until SIGTERM; then another detokenizer takes its streams."""
    process = Process("detokenizer")
    detokenizer = DetokenizerProcess(process)
    detokenizer.loop.run()
    detokenizer.tokens.send(Goodbye())
    process.context.destroy()


if __name__ == "__main__":
    main()
