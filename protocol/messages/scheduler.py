"""Messages to a scheduler from tokenizers, gateway and detokenizers."""

from typing import ClassVar

from msgspec import Struct

from penstock.protocol.messages.packed import PackedLists
from penstock.protocol.messages.sampling import Pooling, SamplingParams, TokenId
from penstock.protocol.messages.structured import Reasoning


class TokenizedRequest(Struct, PackedLists, tag=True):
    """Tokenizer → scheduler: a request in token ids.

    The gateway fills all fields except `prompt_token_ids`, `reasoning` and `bad_words`.
    """

    item_bytes: ClassVar = {"prompt_token_ids": 4, "output_token_ids": 4}

    request_id: str
    attempt: int
    sampling: SamplingParams  # every default filled in
    prompt_token_ids: bytes = b""  # int32 [num_prompt_tokens]
    output_token_ids: bytes = b""  # int32, generated and delivered by an earlier attempt
    # deaths of another replica's workers at which it was in flight, since its last token
    num_deaths: int = 0
    cache_salt: str = ""  # only requests with the same salt share KV blocks
    client: str = ""  # name of the client: clients take turns
    priority: int = 0
    reasoning: Reasoning = "none"
    bad_words: list[list[TokenId]] = []  # those of `sampling`, as token sequences
    pooling: Pooling | None = None  # the request ends with its prompt: no token is sampled
    # its output is reasoning, where it begins so, and an answer: only the answer is stopped
    is_chat: bool = False


class ReleaseRequest(Struct, tag=True):
    """Gateway → scheduler: the request is answered or aborted.

    Until then the scheduler keeps its tokens, because the detokenizer may die before it sends them.
    """

    request_id: str
    attempt: int  # a later attempt is not released


class GatewayStarted(Struct, tag=True):
    """Gateway → scheduler: a gateway has started, which does not know the running requests.

    Its attempts begin at `first_attempt`. A request of an earlier attempt has a lease of
    `lease_timeout` seconds, in which a client may resubmit it.
    """

    first_attempt: int


class StopFound(Struct, tag=True):
    """Detokenizer → scheduler: the text holds a stop string; no more tokens are needed."""

    request_id: str
    attempt: int


ToScheduler = TokenizedRequest | ReleaseRequest | StopFound | GatewayStarted
