"""The plan of one step, and its sampled tokens.

A worker keeps the *persistent batch*: for every slot its block table, length, sampling parameters
and last token. A plan carries changes only, applied in this order: rows removed, rows added,
blocks appended. Then the step runs:

- every slot named in `chunks` computes the given number of its prefill tokens;
- every slot named in `drafts` computes the given tokens at the given positions, and samples a token
  after each of them. The first token is the slot's last token, or -1 for its latest sampled token;
  the others are draft tokens. A slot with one token continues to decode. A slot with draft tokens
  is paused until it is named again, because the sampled tokens show which draft tokens are
  accepted (speculative decoding, Leviathan et al. 2023, arXiv:2211.17192);
- every other slot whose prefill tokens are all computed, and which is not paused, computes its
  latest sampled token (decode).

A slot in `chunks` samples a token after its last prefill token. `SampledTokens` contains all
sampled tokens in ascending order of slot, and within a slot in the order of their positions.
"""

from typing import ClassVar

from msgspec import Struct

from penstock.protocol.messages.packed import PackedLists, PackedLogprobs
from penstock.protocol.messages.sampling import Pooling
from penstock.protocol.messages.structured import Reasoning, StructuredOutputs

BLOCK_BITS = 20  # bits of an int32 for the id of a block; the other bits are the slot's
MAX_BLOCKS = 1 << BLOCK_BITS
MAX_SLOTS = 1 << (31 - BLOCK_BITS)
# tokens after which a chunk of a model with recurrent state ends, counted from the sequence's
# start, unless it is the last chunk; so the arithmetic does not depend on the step's other rows
STATE_CHUNK = 64
# tokens of a decoding sequence with recurrent state in one step, drafts included
STATE_WINDOW = 8


class RowExtras(Struct, array_like=True):
    """Options that few rows have: logits processing and logprobs.

    Filled by the scheduler. Rows with LOGITS_NUMBERS of `penstock.protocol.messages.sampling` also
    have extras.
    """

    num_prompt_tokens: int  # prompt tokens among the row's prefill tokens; the others are output
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0  # output tokens before which no `end_token_ids` may be sampled
    end_token_ids: list[int] = []  # EOS, unless it is ignored, and the row's stop tokens
    # likeliest tokens to report in addition to the sampled token; -1: no logprobs
    num_logprobs: int = -1
    # the same for each prompt token after the first; -1: none, otherwise num_computed_tokens is 0
    num_prompt_logprobs: int = -1
    structured_outputs: StructuredOutputs | None = None
    reasoning: Reasoning = "none"  # beginning of the output of a row with `structured_outputs`
    allowed_token_ids: list[int] = []  # the only tokens that may be sampled; empty: all
    bad_words: list[list[int]] = []  # token sequences that the output must not contain
    # the row ends with its prefill tokens: its result is in `SampledTokens.pooled`
    pooling: Pooling | None = None
    # number of `structured_outputs` in `CompileGrammars`; 0: the worker compiles it in the step
    grammar: int = 0


class RowAdded(Struct, PackedLists, array_like=True):
    """A sequence that enters the persistent batch. Filled by the scheduler."""

    item_bytes: ClassVar = {"token_ids": 4, "block_ids": 4}

    slot: int
    # prefill tokens (the prompt, and earlier output) after the skipped ones: int32 [num_tokens]
    token_ids: bytes
    block_ids: bytes  # block table: int32 [num_blocks], room for every prefill token
    num_computed_tokens: int  # leading tokens whose KV is in the blocks already (prefix cache)
    # by name, the NUMBERS of `penstock.protocol.messages.sampling` that are not neutral: each has a
    # column in the worker's slot table
    sampling: dict[str, float] = {}
    seed: int = 0  # int64, key of the sampling noise
    extras: RowExtras | None = None
    num_prompt_tokens: int = 0  # leading tokens that were not sampled
    num_skipped: int = 0  # leading tokens that `token_ids` lacks: computed ones; 0 with `extras`


class BatchPlan(Struct, PackedLists, array_like=True, tag="plan"):
    """One step of the model, as changes to the persistent batch."""

    item_bytes: ClassVar = {"removed": 4, "appended": 4, "chunks": 8, "drafts": 4, "states": 12}

    epoch: int
    step: int  # counts from 0 in each epoch, without a gap
    removed: bytes = b""  # slots that leave: int32 [num_removed]
    added: list[RowAdded] = []
    # blocks that rows get: int32 [num_appended] of slot << BLOCK_BITS | block id
    appended: bytes = b""
    chunks: bytes = b""  # prefill: int32 [num_chunks, 2] of (slot, number of tokens)
    # int32, for each slot that is named: slot, position of its first token, number of tokens, and
    # these tokens
    drafts: bytes = b""
    # int32 [num, 3] of (slot, state block to read or -1 for zeros, state block to write): the state
    # blocks of rows that compute in this step. After each of its steps a row reads the block that
    # it has written, and writes the block that it has read, until it is named again.
    states: bytes = b""
    num_drafts: int = 0  # number of drafts to make for each row that samples
    is_awaited: bool = False  # the next plan comes after these tokens


class SampledTokens(Struct, PackedLists, array_like=True, tag="sampled"):
    """The tokens of one step, in ascending order of slot. Sent by rank 0."""

    item_bytes: ClassVar = {"token_ids": 4, "drafts": 4}

    epoch: int
    step: int
    token_ids: bytes  # int32 [num_sampled]
    # (index in `token_ids`, ascending; logprobs), for rows that requested logprobs
    logprobs: list[tuple[int, PackedLogprobs]] = []
    # (slot; logprobs of each prompt token that this step's chunk predicts). A chunk of positions
    # [a, b) predicts tokens a + 1 to b, up to the last prompt token.
    prompt_logprobs: list[tuple[int, list[PackedLogprobs]]] = []
    # (index in `token_ids`; reason why the row can't continue). Either its grammar exceeded the
    # limits, and its token is invalid; or its logits are NaN or infinite, and its token is -1.
    failed: list[tuple[int, str]] = []
    # (index in `token_ids`; float32 numbers), for rows with `pooling`, whose token is invalid
    pooled: list[tuple[int, bytes]] = []
    # drafts of the tokens after each of `token_ids`: int32 [num_sampled, `BatchPlan.num_drafts`].
    # Those of a sequence's rows are equal, and follow its last right row.
    drafts: bytes = b""
    seconds: float = 0.0  # that the step took; 0: not measured
