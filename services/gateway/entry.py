"""One accepted request, with all that is needed to begin it again."""

from penstock.protocol.messages.client import (
    ErrorReply,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    PromptFields,
    StopReason,
    TextDelta,
    Usage,
)
from penstock.protocol.messages.logprobs import TokenLogprobs
from penstock.protocol.messages.metrics import RequestTimes
from penstock.protocol.messages.sampling import SamplingParams
from penstock.protocol.messages.tokenizer import TokenizeRequest
from penstock.protocol.transport.event_loop import Timer
from penstock.services.gateway.connections import Client
from penstock.services.gateway.estimates import (
    TEXT_BYTES,
    TOKEN_BYTES,
    estimated_tokens,
    logprob_bytes,
)


class GapError(Exception):
    """A delta begins behind what is known: something between was lost."""


class Entry:
    """One request: who asked what, the tokens and text so far, and what of it the client has."""

    def __init__(
        self, request: GenerateRequest, request_id: str, client: Client, num_bytes: int = 0
    ) -> None:
        self.request = request
        self.request_id = request_id
        self.client = client
        self.share = client.share
        """that the request counts for"""
        self.priority = request.priority
        self.sampling = SamplingParams(
            **{field: getattr(request, field) for field in SamplingParams.__struct_fields__}
        )
        self._is_stream = request.stream
        self.attempt = 0
        self.replica = 0
        """that works at it"""
        self.left: dict[int, int] = {}
        """attempt → replica, of attempts that were left to be gone on with by another one"""
        self.num_deaths = 0
        """as in `TokenizeRequest`"""
        self.timer: Timer | None = None
        self.num_bytes = num_bytes
        """of the request's frame, the text and the tokens"""
        has_grammar = request.structured_outputs is not None
        self.size = TEXT_BYTES * estimated_tokens(request) if has_grammar else num_bytes
        """about as many bytes are to be tokenized: a grammar is compiled apart"""
        self.is_open = True
        """it is to be worked at"""
        self.tokenizer = b""
        """who passed this attempt on; empty when something has come of it"""
        self.num_attempts = 0
        self.accepted_at = self.first_token_at = self.last_token_at = 0.0
        """moments of one clock, seconds; 0: not yet"""
        self.num_waiting_tokens = estimated_tokens(request)
        """of the prompt, while nothing has come out of it; then 0"""
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self._starts_reasoning = False
        self.phase_seconds = (0.0, 0.0)  # as in `StreamOpened`
        self._stop_reason: StopReason = None
        self.token_ids: list[int] = list(request.output_token_ids)
        self._token_bytes = TOKEN_BYTES + logprob_bytes(request.logprobs)
        self._logprobs: list[TokenLogprobs | None] | None = None
        if request.logprobs is not None:
            self._logprobs = [None] * len(self.token_ids)
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._prompt_bytes = 0
        self.answer: GenerateReply | ErrorReply | None = None
        """set when the request has ended"""
        self._text: list[str] = []
        self._num_chars = 0
        self.rewind()

    @property
    def key(self) -> object:
        """Names this attempt among the work of tokenizers."""
        return self.request_id, self.attempt

    def rewind(self) -> None:
        """The client has nothing: it is another one."""
        self._told_tokens = self._told_chars = self._told_pieces = 0

    def submission(self) -> TokenizeRequest:
        """The request, to be gone on with behind the tokens it has."""
        return TokenizeRequest(
            request_id=self.request_id,
            attempt=self.attempt,
            sampling=self.sampling,
            cache_salt=self.request.cache_salt or "",
            output_token_ids=self.token_ids,
            replica=self.replica,
            num_deaths=self.num_deaths,
            client=self.share.name,
            priority=self.priority,
            **{field: getattr(self.request, field) for field in PromptFields.__struct_fields__},
        )

    def append(self, delta: TextDelta) -> bool:
        """Takes what is new in `delta`; False if nothing is.

        Every hop may repeat itself, so a delta may begin before what is known. Raises GapError if
        it begins behind it.
        """
        if delta.attempt != self.attempt:
            return False
        num_tokens = len(self.token_ids) - delta.token_offset
        num_chars = self._num_chars - delta.char_offset
        if num_tokens < 0 or num_chars < 0:
            raise GapError(
                f"delta begins at token {delta.token_offset}; {len(self.token_ids)} are known"
            )
        if delta.prompt_logprobs and self._prompt_logprobs is None:
            self._take_prompt_logprobs(delta.prompt_logprobs)
        token_ids, text = delta.token_ids[num_tokens:], delta.text[num_chars:]
        if not token_ids and not text and delta.finish_reason is None:
            return False
        self.token_ids += token_ids
        self.num_deaths = 0
        self.tokenizer = b""
        if self._logprobs is not None:
            unknown = [None] * len(delta.token_ids)
            self._logprobs += (delta.logprobs or unknown)[num_tokens:]
        self._text.append(text)
        self._num_chars += len(text)
        self.num_bytes += len(text) + self._token_bytes * len(token_ids)
        self.num_prompt_tokens = delta.prompt_tokens
        self.num_cached_tokens = delta.cached_tokens
        self._starts_reasoning = delta.starts_reasoning
        self._stop_reason = delta.stop_reason
        if not self.phase_seconds[1]:
            self.phase_seconds = delta.phase_seconds
        return True

    def _take_prompt_logprobs(self, logprobs: list[TokenLogprobs | None]) -> None:
        self._prompt_logprobs = logprobs
        self._prompt_bytes = len(logprobs) * logprob_bytes(self.request.prompt_logprobs)
        self.num_bytes += self._prompt_bytes

    def untold(self) -> TextDelta | None:
        """What a streaming client has not been told; None if there is nothing."""
        num_pieces = len(self._text) - self._told_pieces
        if not self._is_stream or not num_pieces:
            return None
        token_ids = self.token_ids[self._told_tokens :]
        text = self._text[-1] if num_pieces == 1 else "".join(self._text[self._told_pieces :])
        if not token_ids and not text:
            return None
        return TextDelta(
            request_id=self.request_id,
            token_offset=self._told_tokens,
            char_offset=self._told_chars,
            token_ids=token_ids,
            text=text,
            starts_reasoning=self._starts_reasoning,
            logprobs=self._logprobs and self._logprobs[self._told_tokens :],
        )

    def told(self) -> None:
        """The client has been told all that was untold."""
        self._told_tokens = len(self.token_ids)
        self._told_chars = self._num_chars
        self._told_pieces = len(self._text)

    @property
    def num_unread_bytes(self) -> int:
        """About as many bytes of answers are kept for the client."""
        num_tokens = num_chars = num_bytes = 0
        if self.request.stream:
            num_tokens = len(self.token_ids) - self._told_tokens
            num_chars = self._num_chars - self._told_chars
        if self.answer:
            num_tokens += len(self.token_ids)
            num_chars += self._num_chars
            num_bytes = self._prompt_bytes
        return num_bytes + num_chars + self._token_bytes * num_tokens

    def reply(self, reason: FinishReason) -> GenerateReply:
        """The whole answer."""
        return GenerateReply(
            request_id=self.request_id,
            text="".join(self._text),
            token_ids=self.token_ids,
            finish_reason=reason,
            starts_reasoning=self._starts_reasoning,
            stop_reason=self._why_stopped() if reason == "stop" else None,
            times=RequestTimes.of(
                self.accepted_at, self.first_token_at, self.last_token_at, self.phase_seconds
            ),
            usage=Usage(
                prompt_tokens=self.num_prompt_tokens,
                cached_tokens=self.num_cached_tokens,
                output_tokens=len(self.token_ids),
            ),
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
        )

    def _why_stopped(self) -> StopReason:
        last = self.token_ids[-1] if self.token_ids else -1
        return self._stop_reason or (last if last in self.sampling.stop_token_ids else None)
