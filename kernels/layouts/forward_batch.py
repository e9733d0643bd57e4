"""The input of the model in one step."""

from typing import NamedTuple

from torch import Tensor

from penstock.kernels.layouts.states import StateStep

SMALL_TILE, LARGE_TILE = 64, 128
MANY_TOKENS = 512  # steps with more have large tiles


def tile_size(num_tokens: int, num_decode: int, num_chunks: int) -> int:
    """Return the number of tokens of a prefill chunk in one program of the attention.

    Chunks should fill their tiles. num_tokens: of the step. num_decode: decoding rows. (H200)
    """
    is_short = num_tokens - num_decode < LARGE_TILE * max(num_chunks, 1)
    return SMALL_TILE if is_short and num_tokens <= MANY_TOKENS else LARGE_TILE


class BatchShape(NamedTuple):
    """Size of a step, or maximum size of a CUDA graph's steps, which are padded."""

    num_rows: int
    num_tokens: int
    num_decode: int  # leading rows that decode; in a graph with prefill, rows that may decode
    num_tiles: int  # tiles of all prefill chunks; 0 without prefill
    tile_size: int  # tokens of a tile
    max_seqlen_q: int  # maximum tokens of one row
    max_seqlen_k: int  # longest context


class ForwardBatch(NamedTuple):
    """Input of a step: decoding rows, then prefilling rows; their tokens are concatenated.

    Names and meanings match flash-attn's arguments. A padded row has context length 0, and a padded
    token has slot -1: for these, nothing is read or stored.
    """

    shape: BatchShape
    input_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]: index of each token in its sequence
    slot_mapping: Tensor  # int64 [num_tokens]: block id * block_size + offset of each token's KV
    cu_seqlens_q: Tensor  # int32 [num_rows + 1]: index of each row's first token
    cu_seqlens_k: Tensor  # int32 [num_rows + 1]: sums of `context_lens`
    context_lens: Tensor  # int32 [num_rows]: length of each sequence, including this step's tokens
    decode_lens: Tensor  # int32 [num_decode]: context lengths of decoding rows, 0 for other rows
    tiles: Tensor  # int32 [num_tiles, 2]: row and first token in the row; -1 for a padded tile
    block_tables: Tensor  # int32 [num_rows, max_blocks]
    states: StateStep | None = None  # for a model with recurrent state
