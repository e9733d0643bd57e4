"""Requests and replies of `/v1/embeddings`, `/v1/rerank` and `/v1/score`."""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from penstock.protocol.messages.client import CacheSalt, Priority, RequestId
from penstock.protocol.messages.sampling import Positive, TokenId

MAX_INPUTS = 2048  # of one request, as in OpenAI's API
Texts = str | list[str]
TruncateTo = Annotated[int, Meta(ge=-1, lt=2**31)]


class PoolingRequest(Struct, kw_only=True):
    """Fields of all three."""

    model: str | None = None
    priority: Priority = 0
    cache_salt: CacheSalt | None = None
    request_id: RequestId | None = None


class EmbeddingRequest(PoolingRequest, kw_only=True):
    """`POST /v1/embeddings`."""

    input: str | list[str | TokenId | list[TokenId]]  # a text, token ids, or a list of either
    dimensions: Positive | None = None
    # base64: of float32 numbers, little-endian
    encoding_format: Literal["float", "base64"] = "float"
    add_special_tokens: bool | None = None
    # keep N tokens of a longer text; -1: as many as the context has
    truncate_prompt_tokens: TruncateTo | None = None
    # where tokens are cut off; those that the tokenizer adds are kept
    truncation_side: Literal["left", "right"] = "right"


class Document(Struct, kw_only=True):
    """A document as Cohere's and Jina's clients may send it; further fields are ignored."""

    text: str


class RerankRequest(PoolingRequest, kw_only=True):
    """`POST /v1/rerank`."""

    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_INPUTS)]
    top_n: Annotated[int, Meta(ge=0, lt=2**31)] = 0  # results to return, the best ones; 0: all
    return_documents: bool = True
    instruction: str | None = None  # the task, for the model's prompt
    max_tokens_per_doc: Positive | None = None  # keep the first N tokens of a longer document
    # cut documents so that a prompt has N tokens; -1: as many as the context has
    truncate_prompt_tokens: TruncateTo | None = None


class ScoreRequest(PoolingRequest, kw_only=True):
    """`POST /v1/score`: pairs of texts; one first text may stand for all pairs."""

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
