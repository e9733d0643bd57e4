"""The state of a request: its client, parameters, output, and the delivered part of the output."""

from collections import deque
from time import monotonic
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from penstock.protocol.messages.client import (
    MSGPACK,
    Codec,
    DetokenizeRequest,
    ErrorReply,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    PromptFields,
    TextDelta,
    TokenizePromptRequest,
    TokenLogprobs,
    Usage,
)
from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.pipeline import StreamDelta, TokenizedRequest, TokenizeRequest
from penstock.protocol.messages.sampling import NUMBERS, SamplingParams
from penstock.protocol.messages.status import Metrics, RequestTimes
from penstock.protocol.tokenizer_file import GenerationConfig
from penstock.protocol.transport.event_loop import Timer

TOKEN_BYTES = 8  # estimated bytes of a token id, in memory and in messages
TEXT_BYTES = 4  # estimated bytes of text per token, until a tokenizer has counted the tokens
# Sampling parameters of a request with `pooling`: none of them changes the logits.
POOLED = msgspec.convert({**NUMBERS, "max_tokens": 1, "speculative": False}, SamplingParams)
_LOGPROB_BYTES = 256  # estimated bytes of a `Logprob`: four objects and their struct
DEFAULTS = GenerationConfig()
NO_DELTA = StreamDelta(request_id="", token_offset=0, char_offset=0, token_ids=[], text="")
Output = TextDelta | GenerateReply | ErrorReply
TokenizerRequest = TokenizePromptRequest | DetokenizeRequest  # answered without a scheduler
WorkRequest = GenerateRequest | TokenizerRequest
_decode = msgspec.msgpack.Decoder(GenerateRequest).decode
_decode_logprobs = msgspec.msgpack.Decoder(TokenLogprobs).decode


class Share:
    """Counters of open work of a client (CURVE key, address or process), or of a model."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.num_open = 0  # requests and tokenizer queries that are not answered
        self.num_waiting_tokens = 0  # prompt tokens of requests that have no output yet
        self.num_bytes = 0
        # Only in the share of a model: requests without output; requests with a first token.
        self.num_waiting = self.num_started = 0

    def count(
        self, share: "Share", num_open: int = 0, num_tokens: int = 0, num_bytes: int = 0
    ) -> None:
        """Add work to a client's share and to this model's share. Negative numbers remove work."""
        for each in (share, self):
            each.num_open += num_open
            each.num_waiting_tokens += num_tokens
            each.num_bytes += num_bytes


class Connection:
    """A client's connection, with the output and replies that wait to be sent on it.

    `Connections` opens and closes connections. `ClientSocket` counts messages and bytes, and keeps
    the queues of unsent output. `PipelineStatus` counts the status queries that wait.
    """

    def __init__(
        self,
        fd: int = -1,
        share: Share | None = None,
        is_inner: bool = False,
        is_closed: bool = False,
    ) -> None:
        """Store libzmq's descriptor. Inner connections are of our processes, which name clients."""
        self.fd = fd
        self.number = 0
        self.is_inner = is_inner
        self.num_messages = 0  # messages received
        # bytes in the send queues of libzmq and the kernel; `update_num_read` updates the number
        self.num_queued = 0
        # bytes that the client had read at the last `update_num_read`, and `take_progress`
        self.num_read = self.num_read_before = 0
        self.largest = 0  # bytes of the largest message sent
        self.share = share or Share()
        self.host = ""  # address of the client's machine; empty for this machine
        self.is_closed = is_closed  # closed by either side: nothing is sent
        self.is_cut_off = False
        self.is_refused = False  # beyond a limit of connections, and no longer counted
        # ids of requests whose output waits until the queue has room, oldest first
        self.unsent: dict[str, None] = {}
        self.replies: deque[list[bytes]] = deque()  # frames of other unsent replies
        self.num_status_queries = 0
        self.retry_at = 0.0
        # ZeroMQ identity, known from the first message; libzmq's own begin with a zero byte
        self.identity = b""

    @property
    def is_full(self) -> bool:
        return bool(self.unsent or self.replies)


class Client(NamedTuple):
    """The sender of a request: its return address, encoding and share."""

    # frames before the message: the identity, and an empty frame if the sender is a REQ socket
    envelope: tuple[bytes, ...]
    codec: Codec
    connection: Connection
    share: Share  # the share of the named client, else of the connection
    turn: str = ""  # key in a `FairQueue`; the connections of one client take turns


class GapError(Exception):
    """A delta that begins after the end of the known output: output between them was lost."""


class Request:
    """An accepted request: its client, its output so far, and the delivered part of the output.

    The client's message is stored as bytes: decoded lists and maps may be 70 times as large.

    Fields are written by methods of this class and by these classes (checked by `test_writers.py`):

    - `Ledger`: totals, attempt, num_attempts, tokenizer, num_prompt_tokens, num_waiting_tokens,
      answer, is_open
    - `Router`: replica, num_deaths, migrated_from
    - `ClientSocket`: client
    - `Requests`: timer
    """

    def __init__(
        self,
        message: GenerateRequest,
        request_id: str,
        client: Client,
        num_bytes: int = 0,
        generation: GenerationConfig = DEFAULTS,
    ) -> None:
        """Store a request, whose frame has `num_bytes`, with the model's sampling defaults."""
        self.frame = MSGPACK.encode(message)
        self._generation = generation
        self.request_id = request_id
        self.client = client
        self.share, self.turn = client.share, client.turn
        self.totals: Share  # share of the model; set by the ledger
        self.priority = message.priority
        self.is_stream, self.num_answers = message.stream, message.num_answers
        self._max_tokens = None if message.pooling else message.max_tokens
        self._stop_token_ids = message.stop_token_ids
        self.attempt = self.num_attempts = 0
        self.replica = 0
        # attempt → the replica that the request left in this attempt
        self.migrated_from: dict[int, int] = {}
        self.num_deaths = 0  # as in `TokenizedRequest`
        self.timer: Timer | None = None
        self.num_bytes = num_bytes  # bytes of the request's frame, the text and the tokens
        # number of prompt tokens; 0 after the first output
        self.num_waiting_tokens = estimated_tokens(message)
        has_grammar = message.structured_outputs is not None
        # Estimated bytes to be tokenized. A grammar does not count: a child process compiles it.
        self.size = TEXT_BYTES * self.num_waiting_tokens if has_grammar else num_bytes
        self.is_open = True
        # identity of the tokenizer that sent this attempt on; empty after the first output
        self.tokenizer = b""
        self.accepted_at = monotonic()
        # times in seconds of the same clock; 0 before the first token
        self.first_token_at = self.last_token_at = 0.0
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self.phase_seconds = (0.0, 0.0)  # as in `StreamOpened`
        self.token_ids: list[int] = list(message.output_token_ids)
        self.answer: GenerateReply | ErrorReply | None = None
        self._latest = NO_DELTA
        self._token_bytes = TOKEN_BYTES + logprob_bytes(message.logprobs)
        self._logprobs: list[TokenLogprobs | None] | None = None
        self._prompt_token_bytes = logprob_bytes(message.prompt_logprobs)
        if message.logprobs is not None:
            self._logprobs = [None] * len(self.token_ids)
        self._prompt_logprobs: list[Any] = []  # complete at the first output
        self._pooled: bytes | None = None
        self._result_bytes = 0  # estimated bytes of `_prompt_logprobs` and `_pooled`
        self._text: list[str] = []
        self._num_chars = 0
        self._delivered_tokens = self._delivered_chars = self._delivered_pieces = 0

    @property
    def key(self) -> object:
        """The key of this attempt in the work lists of tokenizers."""
        return self.request_id, self.attempt

    @property
    def message(self) -> GenerateRequest:
        """The client's message, decoded from its bytes."""
        return _decode(self.frame)

    def rewind(self) -> None:
        """Deliver the output again from its start, perhaps to a client with another encoding."""
        self._delivered_tokens = self._delivered_chars = self._delivered_pieces = 0
        self._prompt_logprobs[:] = map(self._encoded, self._prompt_logprobs)

    def submission(self) -> TokenizeRequest:
        given, sampling = self.message, POOLED
        if given.pooling is None:
            sampling = msgspec.convert(given, SamplingParams, from_attributes=True)
            self._generation.fill(sampling)
        request = TokenizedRequest(
            request_id=self.request_id,
            attempt=self.attempt,
            sampling=sampling,
            output_token_ids=pack(self.token_ids),
            num_deaths=self.num_deaths,
            cache_salt=given.cache_salt or "",
            client=self.turn,
            priority=self.priority,
            pooling=given.pooling,
            is_chat=given.messages is not None,
        )
        prompt = {name: getattr(given, name) for name in PromptFields.__struct_fields__}
        return TokenizeRequest(request=request, replica=self.replica, **prompt)

    def append(self, delta: StreamDelta) -> bool:
        """Add the new output of a delta. Return False if nothing is new.

        Every hop may send output again, so a delta may begin before the end of the known output.
        Raises GapError for a delta that begins after that end. Logprobs of the prompt are not new
        output: they are delivered with the first.
        """
        if delta.attempt != self.attempt:
            return False
        num_known = len(self.token_ids)
        num_tokens = num_known - delta.token_offset
        num_chars = self._num_chars - delta.char_offset
        if num_tokens < 0 or num_chars < 0:
            raise GapError(f"delta begins at token {delta.token_offset}; {num_known} are known")
        if delta.prompt_logprobs is not None:
            self._append_of_prompt(delta.prompt_logprobs, delta.prompt_offset)
        token_ids, text = delta.token_ids[num_tokens:], delta.text[num_chars:]
        if not token_ids and not text and delta.finish_reason is None:
            return False
        self.token_ids += token_ids
        self.num_deaths = 0
        self.tokenizer = b""
        if self._logprobs is not None:
            unknown = [None] * len(delta.token_ids)
            self._logprobs += (delta.logprobs or unknown)[num_tokens:]
        if delta.pooled is not None:
            self._pooled, self._result_bytes = delta.pooled, len(delta.pooled)
        self.num_bytes += 0 if self._text else self._result_bytes
        self._text.append(text)
        self._num_chars += len(text)
        self.num_bytes += len(text) + self._token_bytes * len(token_ids)
        self.num_prompt_tokens = delta.prompt_tokens
        self.num_cached_tokens = delta.cached_tokens
        self._latest = delta
        if not self.phase_seconds[1]:
            self.phase_seconds = delta.phase_seconds
        return True

    def _append_of_prompt(self, logprobs: list[Raw], offset: int) -> None:
        """Add the new ones of these logprobs. Raises GapError."""
        if not self._prompt_logprobs:
            self._prompt_logprobs.append(None)  # of the first token
        num_old = len(self._prompt_logprobs) - 1 - offset
        if num_old < 0:
            raise GapError(f"logprobs begin at prompt token {offset + 1}, after a gap")
        new = [raw.copy() for raw in logprobs[num_old:]]  # without the rest of the message
        self._prompt_logprobs += map(self._encoded, new)
        self._result_bytes += len(new) * self._prompt_token_bytes

    def _encoded(self, logprobs: Any) -> Any:
        """Return logprobs in MessagePack as they are, unless the client speaks JSON."""
        is_other = isinstance(logprobs, Raw) and self.client.codec is not MSGPACK
        return _decode_logprobs(logprobs) if is_other else logprobs

    def unsent_replies(self) -> list[Output]:
        """Return the replies to be sent: new output, and the answer if the request has ended."""
        return [reply for reply in (self.undelivered(), self.answer) if reply]

    def undelivered(self) -> TextDelta | None:
        """Return the output that was not sent to a streaming client yet; None without output."""
        num_pieces = len(self._text) - self._delivered_pieces
        if not self.is_stream or not num_pieces:
            return None
        token_ids = self.token_ids[self._delivered_tokens :]
        text = self._text[-1] if num_pieces == 1 else "".join(self._text[self._delivered_pieces :])
        if not token_ids and not text:
            return None
        is_first = not self._delivered_pieces
        return TextDelta(
            request_id=self.request_id,
            prompt_tokens=self.num_prompt_tokens if is_first else 0,
            cached_tokens=self.num_cached_tokens if is_first else 0,
            token_offset=self._delivered_tokens,
            char_offset=self._delivered_chars,
            token_ids=token_ids,
            text=text,
            finish_reason=getattr(self.answer, "finish_reason", None),
            starts_reasoning=self._latest.starts_reasoning,
            reasoning_begin=self._latest.reasoning_begin,
            reasoning_end=self._latest.reasoning_end,
            logprobs=self._logprobs and self._logprobs[self._delivered_tokens :],
            prompt_logprobs=self._prompt_logprobs or None if is_first else None,
        )

    def mark_delivered(self) -> None:
        self._delivered_tokens = len(self.token_ids)
        self._delivered_chars = self._num_chars
        self._delivered_pieces = len(self._text)

    @property
    def num_unread_bytes(self) -> int:
        """Estimated bytes of output that wait for the client."""
        num_tokens = num_chars = num_bytes = 0
        if self.is_stream:
            num_tokens = len(self.token_ids) - self._delivered_tokens
            num_chars = self._num_chars - self._delivered_chars
            num_bytes = 0 if self._delivered_pieces else self._result_bytes
        if self.answer:
            num_tokens += len(self.token_ids)
            num_chars += self._num_chars
            num_bytes += self._result_bytes
        return num_bytes + num_chars + self._token_bytes * num_tokens

    def reply(self, reason: FinishReason) -> GenerateReply:
        last = self.token_ids[-1] if self.token_ids else None
        stop_reason = self._latest.stop_reason or (last if last in self._stop_token_ids else None)
        return GenerateReply(
            request_id=self.request_id,
            text="".join(self._text),
            token_ids=self.token_ids,
            finish_reason=reason,
            starts_reasoning=self._latest.starts_reasoning,
            reasoning_begin=self._latest.reasoning_begin,
            reasoning_end=self._latest.reasoning_end,
            stop_reason=stop_reason if reason == "stop" else None,
            times=self._times(),
            usage=Usage(
                prompt_tokens=self.num_prompt_tokens,
                cached_tokens=self.num_cached_tokens,
                output_tokens=len(self.token_ids),
            ),
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs or None if self._text else None,
            pooled=self._pooled,
        )

    def record_tokens(self, metrics: Metrics, num_tokens: int, now: float) -> None:
        """Record new tokens or a pooled result. Several tokens count as one latency."""
        metrics.generation_tokens += num_tokens
        if self.first_token_at:
            metrics.inter_token_latency_seconds.add(now - self.last_token_at)
        else:
            self.first_token_at = now
            metrics.time_to_first_token_seconds.add(now - self.accepted_at)
            metrics.prompt_tokens += self.num_prompt_tokens
            metrics.prefix_cache_hits += self.num_cached_tokens
        self.last_token_at = now

    def record_end(self, metrics: Metrics, reply: GenerateReply | ErrorReply, now: float) -> None:
        if isinstance(reply, ErrorReply):
            metrics.count_failure(reply.code)
            return
        reason, usage = reply.finish_reason, reply.usage
        metrics.request_success[reason] = metrics.request_success.get(reason, 0) + 1
        metrics.e2e_request_latency_seconds.add(now - self.accepted_at)
        metrics.request_prompt_tokens.add(usage.prompt_tokens)
        metrics.request_generation_tokens.add(usage.output_tokens)
        if self._max_tokens is not None:
            metrics.request_params_max_tokens.add(self._max_tokens)
        if self.num_answers:
            metrics.request_params_n.add(self.num_answers)
        if times := reply.times:
            metrics.request_decode_time_seconds.add(times.decode)
            if (num_tokens := usage.output_tokens) > 1:
                seconds = times.decode / (num_tokens - 1)
                metrics.request_time_per_output_token_seconds.add(seconds)
            if times.prefill:  # otherwise the scheduler's times are unknown
                metrics.request_queue_time_seconds.add(times.queue)
                metrics.request_prefill_time_seconds.add(times.prefill)
                metrics.request_inference_time_seconds.add(times.prefill + times.decode)

    def _times(self) -> RequestTimes | None:
        """Return the durations of the request's phases; None before the first token."""
        if not self.first_token_at:
            return None
        queue, prefill = self.phase_seconds
        return RequestTimes(
            queue=queue,
            prefill=prefill,
            decode=self.last_token_at - self.first_token_at,
            first_token=self.first_token_at - self.accepted_at,
        )


def estimated_tokens(message: WorkRequest) -> int:
    """Return the number of prompt tokens: exact for token ids, otherwise bytes / TEXT_BYTES."""
    if isinstance(message, DetokenizeRequest):
        return 0
    if isinstance(message.prompt, list):
        return len(message.prompt)
    texts = [message.prompt or "", *("".join(turn.content) for turn in message.messages or [])]
    return max(1, sum(len(text.encode()) for text in texts) // TEXT_BYTES)


def logprob_bytes(num_likeliest: int | None) -> int:
    """Return the estimated bytes of the logprobs of one token."""
    return 0 if num_likeliest is None else _LOGPROB_BYTES * (1 + num_likeliest)
