"""Incremental detokenization of one request, with stop strings."""

from codecs import getincrementaldecoder
from collections.abc import Sequence
from pathlib import Path

from msgspec import Raw, Struct

from penstock.protocol.messages.client import MSGPACK, FinishReason, Logprob, TokenLogprobs
from penstock.protocol.messages.packed import PackedLogprobs, unpack
from penstock.protocol.messages.pipeline import StreamDelta, StreamOpened
from penstock.protocol.tokenizer_file import (
    ReasoningTokens,
    ReasoningTracker,
    byte_characters,
    read_reasoning_tokens,
    read_tokenizer_file,
)


class TokenBytes(Struct, frozen=True):
    """The bytes of every token by id. Unused ids are in neither map."""

    text: dict[int, bytes]  # special tokens have empty text
    special: dict[int, bytes]  # names of the special tokens
    reasoning: ReasoningTokens
    shown: dict[int, tuple[str, list[int]]] = {}  # text and bytes of tokens that logprobs had

    def logprobs(
        self, packed: PackedLogprobs | None, text_offset: int | None = None
    ) -> TokenLogprobs | None:
        """Return the logprobs of one position, in the format for clients."""
        if packed is None:
            return None
        (token_id, logprob), *others = packed.pairs()
        top = [self._logprob(*pair, rank) for rank, pair in enumerate(others, 1)]
        text, numbers = self._show(token_id)
        return TokenLogprobs(
            token_id=token_id, logprob=logprob, rank=packed.rank, token=text, bytes=numbers,
            top=top, text_offset=text_offset,
        )  # fmt: skip

    def _logprob(self, token_id: int, logprob: float, rank: int) -> Logprob:
        text, numbers = self._show(token_id)
        return Logprob(token_id=token_id, logprob=logprob, token=text, bytes=numbers, rank=rank)

    def _show(self, token_id: int) -> tuple[str, list[int]]:
        """Return a token's text and bytes, made once: prompts may have thousands of logprobs."""
        if token_id not in self.shown:
            data = self.text.get(token_id) or self.special.get(token_id, b"")
            self.shown[token_id] = data.decode(errors="replace"), list(data)
        return self.shown[token_id]


def token_bytes(folder: Path) -> TokenBytes:
    """Return the bytes of a checkpoint's tokens.

    Raises ModelError if the tokenizer is not byte-level.
    """
    file = read_tokenizer_file(folder)
    alphabet = {character: byte for byte, character in enumerate(byte_characters())}
    text = {
        token_id: bytes(alphabet[character] for character in token)
        for token, token_id in file.model.vocab.items()
        if alphabet.keys() >= set(token)
    }
    special: dict[int, bytes] = {}
    for token in file.added_tokens:
        text[token.id] = b"" if token.special else token.content.encode()
        if token.special:
            special[token.id] = token.content.encode()
    return TokenBytes(text, special, read_reasoning_tokens(folder))


Utf8Decoder = getincrementaldecoder("utf-8")


class TextStream:
    """The text of one request.

    The end of the text is held back while it may be half a character or part of a stop string. Stop
    strings and stop tokens apply to the answer, not to a chat's reasoning or the newlines after it.
    """

    def __init__(self, opened: StreamOpened, table: TokenBytes) -> None:
        self.request_id = opened.request_id
        self.attempt = opened.attempt
        self._prompt_tokens = opened.prompt_tokens
        self._cached_tokens = opened.cached_tokens
        self._starts_reasoning = opened.starts_reasoning
        self._phase_seconds = opened.phase_seconds  # set to 0 once sent
        self._table = table
        self._text = table.text
        self._special = {} if opened.skip_special_tokens else table.special
        self._stop = opened.stop
        self._keeps_stop = opened.include_stop_str_in_output
        self._min_tokens = opened.min_tokens
        self._max_held = max((len(stop) - 1 for stop in opened.stop), default=0)
        self._has_logprobs = opened.logprobs is not None
        # the first is set to None once sent
        self._prompt_logprobs, self._prompt_offset = opened.prompt_logprobs, opened.prompt_offset
        self._decoder = Utf8Decoder("replace")
        for token_id in unpack(opened.prompt_tail):  # the prompt may end within a character
            self._decoder.decode(self._text.get(token_id, b""))
        # bytes of an incomplete character at the end of the prompt
        self._prompt_bytes = self._decoder.getstate()[0]
        ends = opened.eos_token_ids, opened.stop_token_ids
        # tokens without text: in reasoning, and in the answer
        self._silent = [frozenset() if self._keeps_stop else frozenset(ids) for ids in ends]
        self._reasoning: ReasoningTracker | None = None
        self._reasoning_begin: int | None = None
        self._reasoning_end: int | None = None
        if opened.is_chat:
            self._reasoning = ReasoningTracker(table.reasoning, opened.starts_reasoning)
            self._reasoning_begin = 0 if self._reasoning.is_open else None
        self._is_between = False  # after reasoning, while the text has only newlines
        self._num_tokens = 0
        self._num_chars = 0
        self._held = ""
        self.stopped = ""  # the stop string that was found, which ends the text

    def feed(
        self, token_ids: list[int], logprobs: Sequence[PackedLogprobs | None] = ()
    ) -> StreamDelta:
        """Return the text that these tokens add. Drop tokens after a stop string.

        Decode token by token, so that the text is independent of batching.
        logprobs: an element for each token, if the request has logprobs.
        """
        offset, text = self._num_tokens, ""
        text_offsets: list[int] = []
        for token_id in token_ids:
            self._num_tokens += 1
            if self._has_logprobs:
                text_offsets.append(self._num_chars + len(text) + len(self._held))
            if self._reasoning is None or self._reasoning.is_over:
                text += self._answer(token_id)
            else:
                text += self._tagged(token_id, self._reasoning, self._num_chars + len(text))
            if self.stopped:
                break
        num_fed = self._num_tokens - offset
        delta = self._delta(offset, token_ids[:num_fed], text)
        if self._has_logprobs:
            if len(logprobs) != len(token_ids):
                raise ValueError(f"got {len(logprobs)} logprobs of {len(token_ids)} tokens")
            delta.logprobs = list(map(self._table.logprobs, logprobs, text_offsets))
        if self._prompt_logprobs is not None:
            self._add_of_prompt(delta, self._prompt_logprobs)
        return delta

    def _add_of_prompt(self, delta: StreamDelta, logprobs: list[PackedLogprobs]) -> None:
        of_prompt = map(self._table.logprobs, logprobs)
        delta.prompt_logprobs = [Raw(MSGPACK.encode(each)) for each in of_prompt]
        delta.prompt_offset, self._prompt_logprobs = self._prompt_offset, None

    def end(self, reason: FinishReason) -> StreamDelta:
        text = self._held + ("" if self._prompt_bytes else self._decoder.decode(b"", final=True))
        return self._delta(self._num_tokens, [], text, reason)

    def _answer(self, token_id: int) -> str:
        """Return the text that a token of the answer completes, held text included."""
        if not self._is_between:
            return self._release(self._decode(self._bytes(token_id)))
        is_blank = token_id in self._table.reasoning.blank
        text = self._decode(self._bytes(token_id, is_answer=not is_blank))
        rest = text.lstrip("\n")
        self._is_between = not rest
        return text[: len(text) - len(rest)] + self._release(rest)

    def _tagged(self, token_id: int, reasoning: ReasoningTracker, num_chars: int) -> str:
        """Return the text that a token of reasoning completes, held text included.

        num_chars: number of characters released before this token.
        """
        was_open = reasoning.is_open
        reasoning.feed(token_id)
        if not (was_open or reasoning.is_open):
            return self._answer(token_id)
        data = self._bytes(token_id, is_answer=False)
        text, self._held = self._held + self._decode(data), ""
        end = num_chars + len(text)
        is_first = not was_open or self._num_tokens == 1  # a model may repeat the prompt's tag
        if token_id == self._table.reasoning.begin and is_first:
            self._reasoning_begin = end
        elif not reasoning.is_open:
            self._reasoning_end = end - len(data)
            self._is_between = True
        return text

    def _bytes(self, token_id: int, is_answer: bool = True) -> bytes:
        if token_id in self._silent[is_answer]:
            return b""
        return self._text.get(token_id) or self._special.get(token_id, b"")

    def _decode(self, data: bytes) -> str:
        """Decode bytes. Drop an incomplete character of the prompt if no byte continues it."""
        if data and self._prompt_bytes:
            try:
                Utf8Decoder("strict").decode(self._prompt_bytes + data[:1])
            except UnicodeDecodeError:
                self._decoder.reset()
            self._prompt_bytes = b""
        return self._decoder.decode(data)

    def _delta(
        self, offset: int, token_ids: list[int], text: str, reason: FinishReason | None = None
    ) -> StreamDelta:
        delta = StreamDelta(
            request_id=self.request_id,
            token_offset=offset,
            char_offset=self._num_chars,
            token_ids=token_ids,
            text=text,
            finish_reason="stop" if self.stopped else reason,
            stop_reason=self.stopped or None,
            attempt=self.attempt,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            starts_reasoning=self._starts_reasoning,
            reasoning_begin=self._reasoning_begin,
            reasoning_end=self._reasoning_end,
            phase_seconds=self._phase_seconds,
        )
        self._phase_seconds = (0.0, 0.0)
        self._num_chars += len(text)
        return delta

    def _release(self, text: str) -> str:
        """Return held and new text, except an end that may be part of a stop string.

        A stop string that ends within held text came before `min_tokens` and is ignored.
        """
        if not self._stop:
            return text
        num_held = len(self._held)
        text = self._held + text
        if self._num_tokens > self._min_tokens:
            found = [
                (at, at + len(stop))
                for stop in self._stop
                if (at := text.find(stop, max(0, num_held - len(stop) + 1))) >= 0
            ]
            if found:
                begin, end = min(found)
                self.stopped = text[begin:end]
                return text[: end if self._keeps_stop else begin]
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _num_held(self, text: str) -> int:
        """Return the length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._max_held, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0
