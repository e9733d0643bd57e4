"""`/v1/embeddings`, `/v1/rerank` and `/v1/score`."""

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.responses import Response, StreamingResponse

from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.client.scoring import LABELS, Scoring, label_id, result_of
from penstock.protocol.messages.client import CacheSalt, GenerateReply, Priority, RequestId
from penstock.protocol.messages.sampling import Pooling, Positive, TokenId
from penstock.services.http.generation.to_generate_request import prompts_of
from penstock.services.http.shared.access import caller
from penstock.services.http.shared.app_state import AppState, Operation
from penstock.services.http.shared.errors import ENCODER, fields_as_sent, invalid, json_response
from penstock.services.http.shared.event_stream import bounded

MAX_INPUTS = 2048  # inputs of a request, as in OpenAI's API
Texts = str | list[str]
TruncateTo = Annotated[int, Meta(ge=-1, lt=2**31)]
Pairs = Sequence[tuple[str, str]]
FIELD_BYTES = 4096  # upper bound of the other fields of a request to the gateway
TOKEN_BYTES = 5  # maximum bytes of a token id in a request to the gateway


class PoolingRequest(Struct, kw_only=True):
    """Fields of requests for embeddings, ranks and scores."""

    model: str | None = None
    priority: Priority = 0
    cache_salt: CacheSalt | None = None
    request_id: RequestId | None = None


class EmbeddingRequest(PoolingRequest, kw_only=True):
    """`POST /v1/embeddings`."""

    input: str | list[str | TokenId | list[TokenId]]  # a text, token ids, or a list of either
    dimensions: Positive | None = None
    # base64 encodes float32 numbers, little-endian
    encoding_format: Literal["float", "base64"] = "float"
    add_special_tokens: bool | None = None
    # keep N tokens of a longer text; -1: as many as fit into the context
    truncate_prompt_tokens: TruncateTo | None = None
    # side at which tokens are cut off; tokens that the tokenizer adds are kept
    truncation_side: Literal["left", "right"] = "right"


class Document(Struct, kw_only=True):
    """A document as Cohere's and Jina's clients may send it; further fields are ignored."""

    text: str


class RerankRequest(PoolingRequest, kw_only=True):
    """`POST /v1/rerank`."""

    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_INPUTS)]
    top_n: Annotated[int, Meta(ge=0, lt=2**31)] = 0  # number of best results to return; 0: all
    return_documents: bool = True
    instruction: str | None = None  # the task, for the model's prompt
    max_tokens_per_doc: Positive | None = None  # keep the first N tokens of a longer document
    # cut documents so that a prompt has N tokens; -1: as many as fit into the context
    truncate_prompt_tokens: TruncateTo | None = None


class ScoreRequest(PoolingRequest, kw_only=True):
    """`POST /v1/score`: pairs of texts; a single first text is used for all pairs."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None  # other names of `text_1` and `text_2`
    documents: Texts | None = None
    instruction: str | None = None
    truncate_prompt_tokens: TruncateTo | None = None  # as in RerankRequest


class PromptUsage(Struct, kw_only=True):
    """Token counts of a request without output."""

    prompt_tokens: int
    total_tokens: int


class PoolingReply(Struct, kw_only=True):
    """Fields of all replies."""

    id: str
    model: str
    usage: PromptUsage


class EmbeddingData(Struct, kw_only=True):
    """The embedding of one input."""

    index: int
    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str


class EmbeddingReply(PoolingReply, kw_only=True):
    """Reply to EmbeddingRequest."""

    object: Literal["list"] = "list"
    created: int
    data: list[EmbeddingData]


class RerankResult(Struct, kw_only=True):
    """One document, by its index in the request."""

    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class RerankReply(PoolingReply, kw_only=True):
    """Reply to RerankRequest, the most relevant document first."""

    results: list[RerankResult]


class ScoreData(Struct, kw_only=True):
    """The score of one pair."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreReply(PoolingReply, kw_only=True):
    """Reply to ScoreRequest."""

    object: Literal["list"] = "list"
    created: int
    data: list[ScoreData]


async def room_of(
    client: AsyncClient,
    pairs: Pairs,
    most: int,
    label_ids: Sequence[int],
    instruction: str | None,
) -> dict[str, int]:
    """Return the tokens that each query leaves for a document in a prompt of `most` tokens.

    Raises ApiError if a query leaves no room.
    """
    plain = {"add_special_tokens": False, "client": caller.get().client}
    room = {}
    for query in dict.fromkeys(query for query, _ in pairs):
        prompt = Scoring([(query, "")], label_ids, instruction).request(0)["prompt"]
        num_tokens = len((await client.tokenize(prompt, **plain)).token_ids)
        room[query] = most - num_tokens
        if room[query] < 1:
            problem = f"got {most}, expected more than the {num_tokens} tokens of the prompt"
            raise invalid("truncate_prompt_tokens", f"{problem} without a document")
    return room


async def cut(client: AsyncClient, pairs: Pairs, most: dict[str, int]) -> Pairs:
    """Return the pairs with documents cut. most: maximum tokens of documents by query."""
    sender = caller.get().client
    plain = {"add_special_tokens": False, "truncation_side": "right", "client": sender}

    async def cut_text(wanted: tuple[str, int]) -> str:
        text, length = wanted
        if len(text.encode()) <= length:  # a token has at least one byte
            return text
        reply = await client.tokenize(text, truncate_prompt_tokens=length + 1, **plain)
        if len(reply.token_ids) <= length:
            return text
        first = await client.detokenize(reply.token_ids[:length], client=sender)
        return first if text.startswith(first) else first.rstrip("\ufffd")  # a partial character

    wanted = dict.fromkeys((document, most[query]) for query, document in pairs)
    texts = dict(zip(wanted, await bounded(cut_text, wanted), strict=True))
    return [(query, texts[document, most[query]]) for query, document in pairs]


async def embed(state: AppState, body: EmbeddingRequest) -> Response:
    """Return the embeddings of texts."""
    inputs = prompts_of(body.input, "input")
    _check_number("input", len(inputs))
    fields = {name: getattr(body, name) for name in ("add_special_tokens", "truncation_side")}
    fields["truncate_prompt_tokens"] = _most(state, body.truncate_prompt_tokens)
    fields["pooling"] = Pooling(dimensions=body.dimensions)
    requests = [{"prompt": given, **fields} for given in inputs]
    is_list = not (isinstance(body.input, str) or isinstance(body.input[0], int))

    def name(index: int) -> str:
        return f"input[{index}]" if is_list else "input"

    for index, given in enumerate(inputs):
        _check_size(state, _size(given), name(index))
    replies = await _replies(state, body, len(inputs), requests.__getitem__, name)
    for reply in replies:
        if reply.pooled is None:
            result_of(reply)  # raises RequestError
    head = _head(state, "embd", body, replies)
    empty = EmbeddingReply(**head, created=int(time.time()), data=[])
    pieces = embedding_pieces(empty, replies, body.encoding_format)
    return StreamingResponse(pieces, media_type="application/json")


async def embedding_pieces(
    head: EmbeddingReply, replies: Sequence[GenerateReply], encoding: str
) -> AsyncIterator[bytes]:
    """Yield the JSON text of a reply; other requests get a turn between two embeddings.

    head: the reply without data.
    """
    text = ENCODER.encode(head)  # ends with `"data":[]}`
    yield text[:-2]
    for index, reply in enumerate(replies):
        data = EmbeddingData(index=index, embedding=_embedding(reply, encoding))
        yield b"," * (index > 0) + ENCODER.encode(data)
        await asyncio.sleep(0)
    yield text[-2:]


def _embedding(reply: GenerateReply, encoding: str) -> list[float] | str:
    numbers = result_of(reply)
    return numbers if encoding == "float" else base64.b64encode(reply.pooled or b"").decode()


async def rerank(state: AppState, body: RerankRequest) -> Response:
    """Sort documents by their relevance to a query."""
    texts = [
        document if isinstance(document, str) else document.text for document in body.documents
    ]
    pairs, names = [(body.query, text) for text in texts], ("query", "documents")
    scores, replies = await _scores(state, body, pairs, names, body.max_tokens_per_doc)
    order = sorted(range(len(texts)), key=lambda index: -scores[index])
    results = [
        RerankResult(
            index=index,
            relevance_score=scores[index],
            document=Document(text=texts[index]) if body.return_documents else UNSET,
        )
        for index in order[: body.top_n or None]
    ]
    return json_response(RerankReply(**_head(state, "rerank", body, replies), results=results))


async def score(state: AppState, body: ScoreRequest) -> Response:
    """Return the scores of pairs of texts."""
    pairs, names = _pairs(body)
    scores, replies = await _scores(state, body, pairs, names)
    data = [ScoreData(index=index, score=score) for index, score in enumerate(scores)]
    head = _head(state, "score", body, replies)
    return json_response(ScoreReply(**head, created=int(time.time()), data=data))


async def _scores(
    state: AppState,
    body: RerankRequest | ScoreRequest,
    pairs: Pairs,
    names: tuple[str, str],
    max_tokens_per_doc: int | None = None,
) -> tuple[list[float], list[GenerateReply]]:
    """Return scores and replies. names: names of the fields with queries and documents."""
    labels, most = await _labels(state), _most(state, body.truncate_prompt_tokens)
    for text in {text for pair in pairs for text in pair} if most or max_tokens_per_doc else ():
        _check_size(state, _size(text), names[1])
    if max_tokens_per_doc:
        pairs = await cut(state.client, pairs, {query: max_tokens_per_doc for query, _ in pairs})
    if most and labels:
        room = await room_of(state.client, pairs, most, labels, body.instruction)
        pairs = await cut(state.client, pairs, room)
    scoring = Scoring(pairs, labels, body.instruction)
    _check_parts(state, scoring.parts, names)
    own: dict[str, Any] = {}
    if most and not labels:
        own = {"truncate_prompt_tokens": most, "truncation_side": "right"}

    def request(index: int) -> dict[str, Any]:
        return scoring.request(index) | own

    replies = await _replies(state, body, len(scoring.parts), request, lambda _: names[1])
    return scoring.scores(replies), replies


def _most(state: AppState, given: int | None) -> int | None:
    """Return the number of tokens that `truncate_prompt_tokens` allows. Raises ApiError."""
    if given == 0:
        raise invalid("truncate_prompt_tokens", "got 0, expected -1 or more than 0")
    return state.max_model_len if given == -1 else given


async def _labels(state: AppState) -> list[int] | None:
    if state.label_ids is None and not state.is_embedding_model:
        client = state.client
        tokens = [await client.tokenize(label, add_special_tokens=False) for label in LABELS]
        pairs = zip(LABELS, tokens, strict=True)
        state.label_ids = [label_id(label, reply.token_ids) for label, reply in pairs]
    return state.label_ids


async def _replies(
    state: AppState,
    body: PoolingRequest,
    number: int,
    request: Callable[[int], dict[str, Any]],
    name: Callable[[int], str],
) -> list[GenerateReply]:
    """Return the reply to each of `number` requests.

    request: makes a request when it is to be sent, because each may copy a long query. name:
    returns the name of the field with the text of a request.
    """
    sender = caller.get()
    own: dict[str, Any] = {"priority": body.priority, "cache_salt": body.cache_salt}
    own["client"] = sender.client

    async def reply(index: int) -> GenerateReply:
        with fields_as_sent({"prompt": name(index)}.get):
            request_id = f"{sender.unique_id}-{index}"
            stream = state.client.submit(**request(index), **own, request_id=request_id)
            return await stream.result()

    return await bounded(reply, range(number))


def _check_size(state: AppState, size: int, name: str, what: str = "") -> None:
    """Raise ApiError for an input that exceeds the gateway's limit."""
    most = state.max_request_bytes - FIELD_BYTES
    if size > most:
        raise invalid(name, f"got {size} bytes{what}, expected up to {most}")


def _check_parts(state: AppState, parts: Sequence[dict[str, str]], names: tuple[str, str]) -> None:
    """Raise ApiError for a too long prompt of several texts, naming the longest text's field."""
    fields = dict(zip(("query", "document"), names, strict=True))
    sizes = {text: _size(text) for text in {text for part in parts for text in part.values()}}
    for part in parts:
        kind = max(part, key=lambda kind: sizes[part[kind]])
        what = f" of {' and '.join(part)} together" if len(part) > 1 else ""
        total = sum(sizes[text] for text in part.values())
        _check_size(state, total, fields.get(kind, kind), what)


def _head(
    state: AppState, kind: str, body: PoolingRequest, replies: Sequence[GenerateReply]
) -> dict[str, Any]:
    number = sum(reply.usage.prompt_tokens for reply in replies)
    return {
        "id": f"{kind}-{body.request_id or caller.get().unique_id}",
        "model": state.model,
        "usage": PromptUsage(prompt_tokens=number, total_tokens=number),
    }


def _size(prompt: str | list[int]) -> int:
    """Return an upper bound of a prompt's bytes in a request to the gateway."""
    return len(prompt.encode()) if isinstance(prompt, str) else TOKEN_BYTES * len(prompt)


def _pairs(body: ScoreRequest) -> tuple[list[tuple[str, str]], tuple[str, str]]:
    """Return the pairs, and the names of the two fields. Raises ApiError."""
    has_queries = body.queries is not None or body.documents is not None
    names = ("queries", "documents") if has_queries else ("text_1", "text_2")
    others = {"text_1", "text_2"} if has_queries else set()
    if given := sorted(name for name in others if getattr(body, name) is not None):
        raise invalid(given[0], f"got {names[0]} or {names[1]}, too; send one kind of names")
    lists = []
    for name in names:
        value = getattr(body, name)
        if not value:
            raise invalid(name, "got nothing, expected a text or a list of texts")
        lists.append([value] if isinstance(value, str) else value)
        _check_number(name, len(lists[-1]))
    first, second = lists
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        counts = f"got {len(second)} texts for {len(first)} of {names[0]}"
        raise invalid(names[1], f"{counts}, expected as many, or one of {names[0]}")
    return list(zip(first, second, strict=True)), names


def _check_number(name: str, number: int) -> None:
    if number > MAX_INPUTS:
        raise invalid(name, f"got {number} entries, expected up to {MAX_INPUTS}")


OPERATIONS = [
    Operation("POST", "/v1/embeddings", embed, EmbeddingReply, EmbeddingRequest, is_batch=True),
    *(
        Operation("POST", path, rerank, RerankReply, RerankRequest, is_batch=True)
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    *(
        Operation("POST", path, score, ScoreReply, ScoreRequest, is_batch=True)
        for path in ("/v1/score", "/score")
    ),
]
