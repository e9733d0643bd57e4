"""The ledger: every accepted request, with all that is needed to begin it again."""

from typing import NamedTuple

from penstock.protocol.client import (
    Codec,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    TextDelta,
    Usage,
)
from penstock.protocol.messages import TokenizeRequest
from penstock.protocol.sampling import SamplingParams


class Client(NamedTuple):
    """Where an answer goes, and in which encoding."""

    envelope: tuple[bytes, ...]
    """the frames before the message: identity, and an empty one for a REQ socket"""
    codec: Codec


class GapError(Exception):
    """A delta begins behind what is known: something between was lost."""


class Entry:
    """One request: who asked what, and the tokens and text delivered so far."""

    def __init__(self, request: GenerateRequest, request_id: str, client: Client) -> None:
        self.request = request
        self.request_id = request_id
        self.client = client
        self.sampling = SamplingParams(
            **{field: getattr(request, field) for field in SamplingParams.__struct_fields__}
        )
        self.attempt = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.token_ids: list[int] = []
        self._text: list[str] = []
        self._num_chars = 0

    def submission(self) -> TokenizeRequest:
        """The request, to be gone on with behind the tokens it has."""
        return TokenizeRequest(
            request_id=self.request_id,
            attempt=self.attempt,
            sampling=self.sampling,
            prompt=self.request.prompt,
            messages=self.request.messages,
            output_token_ids=self.token_ids,
        )

    def append(self, delta: TextDelta) -> TextDelta | None:
        """Takes what is new in `delta` and returns it, as the client gets it; None if nothing is.

        Every hop may repeat itself, so a delta may begin before what is known. Raises GapError if
        it begins behind it.
        """
        if delta.attempt != self.attempt:
            return None
        num_tokens = len(self.token_ids) - delta.token_offset
        num_chars = self._num_chars - delta.char_offset
        if num_tokens < 0 or num_chars < 0:
            raise GapError(
                f"delta begins at token {delta.token_offset}; {len(self.token_ids)} are known"
            )
        token_ids, text = delta.token_ids[num_tokens:], delta.text[num_chars:]
        if not token_ids and not text and delta.finish_reason is None:
            return None
        new = TextDelta(
            request_id=self.request_id,
            token_offset=len(self.token_ids),
            char_offset=self._num_chars,
            token_ids=token_ids,
            text=text,
        )
        self.token_ids += token_ids
        self._text.append(text)
        self._num_chars += len(text)
        self.num_prompt_tokens = delta.prompt_tokens
        self.num_cached_tokens = delta.cached_tokens
        return new

    def reply(self, reason: FinishReason) -> GenerateReply:
        """The whole answer."""
        return GenerateReply(
            request_id=self.request_id,
            text="".join(self._text),
            token_ids=self.token_ids,
            finish_reason=reason,
            usage=Usage(
                prompt_tokens=self.num_prompt_tokens,
                cached_tokens=self.num_cached_tokens,
                output_tokens=len(self.token_ids),
            ),
        )


class Ledger:
    """All open requests by id."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def get(self, request_id: str) -> Entry | None:
        """The entry of an open request."""
        return self._entries.get(request_id)

    def add(self, entry: Entry) -> None:
        """A request was accepted."""
        self._entries[entry.request_id] = entry

    def close(self, request_id: str) -> Entry | None:
        """The request is answered, or nobody wants the answer."""
        return self._entries.pop(request_id, None)

    def begin_again(self) -> list[Entry]:
        """The scheduler lost everything: each entry begins another attempt."""
        for entry in self._entries.values():
            entry.attempt += 1
        return list(self._entries.values())
