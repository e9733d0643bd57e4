"""Admission control: validation of clients' requests, and limits on open work. No I/O."""

import contextlib
from collections import deque
from collections.abc import Collection
from typing import Any

import msgspec

from penstock.protocol.checkpoint import max_request_bytes, read_model_config
from penstock.protocol.config import Config
from penstock.protocol.decoding import (
    MAX_DEPTH,
    TOO_MANY_PARTS,
    explain,
    has_too_many_parts,
    is_too_deep,
    undecodable_value,
)
from penstock.protocol.fair_queue import exceeds
from penstock.protocol.messages.client import (
    REQUEST_TYPES,
    Codec,
    DetokenizeRequest,
    ErrorReply,
    GenerateRequest,
    Request,
    RequestKind,
    TokenizePromptRequest,
)
from penstock.protocol.messages.sampling import SamplingParams
from penstock.protocol.poison import comparable
from penstock.protocol.transport.channel import DECODE_ERRORS
from penstock.services.gateway.request import Share, TokenizerRequest

NUM_SAMPLES = 20  # heartbeats in the window of the rate of started requests
MAX_RETRY_AFTER = 60.0  # maximum `retry_after` in seconds
TOKEN_BYTES = 5  # maximum size of a token id in MessagePack
_DEFAULTS = GenerateRequest()
# fields that a request with `pooling` must leave out
_OF_TEXT = (*SamplingParams.__struct_fields__, "stream", "output_token_ids")
# fields of requests with arbitrarily nested values
UNTYPED = ("messages", "tools", "chat_template_kwargs", "structured_outputs")


class RefusedError(Exception):
    """The refusal of a request, with the error reply for its client."""

    def __init__(self, message: str, field: str | None = None, **fields: Any) -> None:
        """Make an error reply from `fields` of `ErrorReply`. Its `code` is `invalid` by default."""
        super().__init__(message)
        self.reply = ErrorReply(**{"code": "invalid", "message": message, "field": field} | fields)


def decode_request(
    codec: Codec, frame: bytes, max_bytes: int, max_output_tokens: int = 0
) -> Request:
    """Decode a client's frame as a request. Raises RefusedError.

    max_bytes: limit on the frame's size without `output_token_ids`, which continued requests have.
    """
    if len(frame) <= max_bytes + TOKEN_BYTES * max_output_tokens:
        request = _decode(codec, frame)
        if len(frame) - TOKEN_BYTES * len(getattr(request, "output_token_ids", ())) <= max_bytes:
            return request
    raise RefusedError(f"request: got {len(frame)} bytes, expected up to {max_bytes}")


def _decode(codec: Codec, frame: bytes) -> Request:
    if has_too_many_parts(frame):
        raise RefusedError(f"the request: {TOO_MANY_PARTS}")
    try:
        request = codec.decode_request(frame)
    except msgspec.ValidationError as error:
        raw = None  # stays None if the frame is broken after the bad value
        with contextlib.suppress(*DECODE_ERRORS):
            raw = codec.decode_any(frame)
        name = raw.get("type", "generate") if isinstance(raw, dict) else None
        kind = REQUEST_TYPES.get(str(name), RequestKind)
        field, message = explain(str(error), raw, kind)
        raise RefusedError(message, field) from error
    except DECODE_ERRORS as error:
        if found := undecodable_value(frame):
            path, problem = found
            raise RefusedError(f"{path or 'the request'}: {problem}", path or None) from error
        text = f"got an undecodable frame ({error}), expected JSON or MessagePack of an object"
        raise RefusedError(f"the request: {text}") from error
    _check_depth(request)
    _check_encoding(request)
    return request


def _check_depth(request: Request) -> None:
    for field in UNTYPED:
        value = getattr(request, field, None)
        if not value or (field == "messages" and not any(message.tool_calls for message in value)):
            continue
        if is_too_deep(value):
            raise refusal(field, f"got a deeper nesting, expected up to {MAX_DEPTH} levels")


def _check_encoding(request: Request) -> None:
    """Raise RefusedError for a field that can't be sent on, or compared with poison requests."""
    try:
        for field in UNTYPED:
            if value := getattr(request, field, None):
                msgspec.msgpack.encode(comparable(value))
    except (*DECODE_ERRORS, TypeError) as error:
        text = f"MessagePack can't encode it ({error}); expected strings as keys, and integers of"
        raise refusal(field, f"{text} up to 64 bits") from error


class Validation:
    """Checks that depend on the model, such as its vocabulary and context length."""

    def __init__(self, config: Config) -> None:
        model = read_model_config(config.model_folder)
        self._model = model
        self.vocab_size = model.vocab_size
        self.max_model_len = model.context(config.max_model_len)
        self._max_bytes = max_request_bytes(config)
        self.trusts_templates = config.trust_request_chat_template

    def decode(self, codec: Codec, frame: bytes) -> Request:
        return decode_request(codec, frame, self._max_bytes, self.max_model_len)

    def check(self, request: GenerateRequest, is_req_socket: bool) -> None:
        self._check_prompt(request)
        if request.pooling is not None or self._model.is_embedding_model:
            self._check_pooling(request)
        if request.n > 1:
            text = f"got {request.n}, expected 1; send a request for each answer, with the seed + i"
            raise refusal("n", text)
        if request.stream and is_req_socket:
            raise refusal("stream", "got true on a REQ socket, expected a DEALER socket")
        number, most = request.max_tokens, self.max_model_len
        if number is not None and number > most:
            raise refusal("max_tokens", f"got {number}, expected up to {most}, the model's context")
        if number is not None and request.min_tokens > number:
            text = f"got {request.min_tokens}, expected up to max_tokens, {number}"
            raise refusal("min_tokens", text)
        self._check_token_ids("output_token_ids", request.output_token_ids)
        self._check_token_ids("stop_token_ids", request.stop_token_ids)
        self._check_token_ids("logit_bias", request.logit_bias)
        self._check_token_ids("allowed_token_ids", request.allowed_token_ids or [])

    def _check_pooling(self, request: GenerateRequest) -> None:
        """Check `pooling`: embedding models generate no text, other models give no embeddings."""
        pooling, embeds = request.pooling, self._model.is_embedding_model
        if pooling is None:
            text = "got an embedding model, which generates no text; send inputs to /v1/embeddings"
            raise refusal("model", text)
        for field in _OF_TEXT:
            if getattr(request, field) != getattr(_DEFAULTS, field):
                text = "got a value together with pooling, which samples no token; leave it out"
                raise refusal(field, text)
        if not embeds and not pooling.label_ids:
            text = "got one that generates text, expected an embedding model, as Qwen3-Embedding"
            raise refusal("model", text)
        if embeds and pooling.label_ids:
            text = "got an embedding model, which has no output layer; leave label_ids out"
            raise refusal("model", text)
        most = self._model.hidden_size if embeds else 0
        if (pooling.dimensions or 0) > most:
            text = f"got {pooling.dimensions}, expected up to {most}, the length of an embedding"
            raise refusal("dimensions", text)
        self._check_token_ids("label_ids", pooling.label_ids)

    def check_query(self, query: TokenizerRequest) -> None:
        if isinstance(query, DetokenizeRequest):
            self._check_token_ids("token_ids", query.token_ids)
        else:
            self._check_prompt(query)

    def _check_prompt(self, request: GenerateRequest | TokenizePromptRequest) -> None:
        if (request.prompt is None) == (request.messages is None):
            given = "both" if request.prompt is not None else "neither"
            raise refusal("prompt", f"got {given} of prompt and messages, expected one of them")
        if request.tools is not None and request.messages is None:
            raise refusal("tools", f"got {len(request.tools)} without messages, expected both")
        if isinstance(request.prompt, list):
            self._check_token_ids("prompt", request.prompt)
        if request.chat_template is not None and not self.trusts_templates:
            start = "start the pipeline with --trust-request-chat-template"
            raise refusal("chat_template", f"got one, expected the model's; {start}")
        if request.continue_final_message and request.add_generation_prompt:
            text = "got true, as add_generation_prompt; expected one of them"
            raise refusal("continue_final_message", text)

    def _check_token_ids(self, field: str, token_ids: Collection[int]) -> None:
        largest = max(token_ids, default=0)
        if largest >= self.vocab_size:
            is_map = isinstance(token_ids, dict)
            path = field if is_map else f"{field}[{list(token_ids).index(largest)}]"
            got = f"the key {largest}" if is_map else largest
            text = f"{path}: got {got}, expected a token id up to {self.vocab_size - 1}"
            raise RefusedError(text, field)


def refusal(field: str, text: str) -> RefusedError:
    """Return the error for a bad field, which the message names first."""
    return RefusedError(f"{field}: {text}", field)


def check_same(request: GenerateRequest, known: GenerateRequest) -> None:
    """Raise RefusedError if `known` differs from `request` in more than `output_token_ids`."""
    is_same = msgspec.structs.replace(request, output_token_ids=known.output_token_ids) == known
    text = f"got {request.request_id!r}, which another open request has; choose another id"
    if not is_same:
        raise RefusedError(f"request_id: {text}", "request_id", request_id=request.request_id)


class Admission:
    """Limits on open requests and queries, waiting prompt tokens and bytes.

    The tokenizer counts the tokens of a prompt. A request has started when it has output.
    A refusal has a `retry_after`: the estimated time until all waiting requests have started, at
    the rate of the last NUM_SAMPLES heartbeats. The time is 1 to 60 seconds; 1 if none has started.
    When one client has filled a limit, a few places are left for other clients: see `exceeds`.
    """

    def __init__(self, config: Config, totals: Share) -> None:
        self._totals = totals
        self._max_requests = config.max_running + config.max_waiting_requests
        self._max_waiting_tokens = config.max_waiting_tokens
        self._max_open_bytes = config.max_open_bytes
        # (time in seconds, number of requests started by then)
        self._starts: deque[tuple[float, int]] = deque(maxlen=NUM_SAMPLES)

    def sample(self, now: float) -> None:
        """Sample the number of started requests, at every heartbeat (`now` in seconds)."""
        self._starts.append((now, self._totals.num_started))

    def check(self, num_bytes: int, num_tokens: int, share: Share) -> None:
        """Raise RefusedError if a request or query of this size would exceed a limit."""
        totals = self._totals
        if exceeds(1, share.num_open, totals.num_open, self._max_requests):
            raise self._refusal(
                f"{totals.num_open} requests are open; the limit is {self._max_requests}"
            )
        waiting, limit = totals.num_waiting_tokens, self._max_waiting_tokens
        is_over = exceeds(num_tokens, share.num_waiting_tokens, waiting, limit)
        if waiting and num_tokens and is_over:
            raise self._refusal(
                f"{waiting + num_tokens} prompt tokens would wait, {num_tokens} of this request; "
                f"the limit is {limit}"
            )
        if exceeds(num_bytes, share.num_bytes, totals.num_bytes, self._max_open_bytes):
            raise self._refusal(
                f"open requests and their answers have {totals.num_bytes} bytes, this request has "
                f"{num_bytes}; the limit is {self._max_open_bytes}"
            )

    def _refusal(self, reason: str) -> RefusedError:
        seconds = 1.0
        if self._starts and (num_new := self._starts[-1][1] - self._starts[0][1]):
            elapsed = self._starts[-1][0] - self._starts[0][0]
            seconds = max(1.0, self._totals.num_waiting * elapsed / num_new)
        wait = min(seconds, MAX_RETRY_AFTER)
        return RefusedError(f"overloaded: {reason}", code="overloaded", retry_after=wait)
