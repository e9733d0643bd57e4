"""Messages between gateway and tokenizers."""

from msgspec import Struct, field

from penstock.protocol.messages.client import (
    DetokenizeReply,
    DetokenizeRequest,
    ErrorReply,
    PromptFields,
    TokenizePromptRequest,
    TokenizeReply,
)
from penstock.protocol.messages.registration import Goodbye, Heartbeat, Refused
from penstock.protocol.messages.sampling import Pooling, SamplingParams, TokenId


class TokenizeRequest(PromptFields, tag=True, omit_defaults=True):
    """Gateway → tokenizer: one submission of a request."""

    request_id: str
    attempt: int
    sampling: SamplingParams
    output_token_ids: list[TokenId] = field(default_factory=list)
    """output that an earlier attempt delivered; generation continues after it"""
    replica: int = 0
    """whose scheduler gets it"""
    num_deaths: int = 0
    cache_salt: str = ""
    client: str = ""
    priority: int = 0
    pooling: Pooling | None = None
    """these five as in `TokenizedRequest`"""


class TokenizerQuery(Struct, tag=True):
    """Gateway → tokenizer: something to be answered by a tokenizer alone."""

    number: int
    question: TokenizePromptRequest | DetokenizeRequest


class TokenizerReply(Struct, tag=True):
    """Tokenizer → gateway."""

    number: int
    reply: TokenizeReply | DetokenizeReply | ErrorReply


class TokenizeDone(Struct, tag=True):
    """Tokenizer → gateway: the request is with the scheduler."""

    request_id: str
    attempt: int
    num_prompt_tokens: int = 0


class RequestFailed(Struct, tag=True):
    """Tokenizer or scheduler → gateway: the request can't be served, and why."""

    request_id: str
    attempt: int
    error: ErrorReply
    is_poison: bool = False
    """it has ended processes: asked again, it is to be refused"""


ToTokenizer = TokenizeRequest | TokenizerQuery | Refused
FromTokenizer = Heartbeat | Goodbye | TokenizeDone | RequestFailed | TokenizerReply
