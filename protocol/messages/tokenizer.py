"""Messages between gateway and tokenizers."""

from msgspec import Struct

from penstock.protocol.messages.client import (
    DetokenizeReply,
    DetokenizeRequest,
    ErrorReply,
    PromptFields,
    TokenizePromptRequest,
    TokenizeReply,
)
from penstock.protocol.messages.registration import Goodbye, Heartbeat, Refused
from penstock.protocol.messages.scheduler import TokenizedRequest


class TokenizeRequest(PromptFields, tag=True, omit_defaults=True):
    """Gateway → tokenizer: a prompt, and the request that its token ids complete."""

    request: TokenizedRequest  # without the fields that the tokenizer fills in
    replica: int = 0  # the replica whose scheduler gets the request


class TokenizerQuery(Struct, tag=True):
    """Gateway → tokenizer: a request that a tokenizer answers alone."""

    number: int
    query: TokenizePromptRequest | DetokenizeRequest


class TokenizerReply(Struct, tag=True):
    """Tokenizer → gateway: the answer to a `TokenizerQuery`."""

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
    is_poison: bool = False  # the request has killed processes: equal requests are to be refused


ToTokenizer = TokenizeRequest | TokenizerQuery | Refused
FromTokenizer = Heartbeat | Goodbye | TokenizeDone | RequestFailed | TokenizerReply
