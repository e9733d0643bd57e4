"""The tokens of one step, as the model and its attention see them."""

from typing import NamedTuple

from torch import Tensor

SMALL_TILE, LARGE_TILE = 64, 128
LONG_CHUNK = 1024
"""tokens of one row beyond which large tiles are faster (H200)"""


def tile_size(max_seqlen_q: int) -> int:
    """Tokens of a prefill chunk that one program of the attention takes."""
    return SMALL_TILE if max_seqlen_q <= LONG_CHUNK else LARGE_TILE


class Shape(NamedTuple):
    """How large a step is; in a CUDA graph, how large it may be: the rest is padding."""

    num_rows: int
    num_tokens: int
    num_decode: int
    """rows at the front that decode; of a graph that prefills, too: those that may"""
    num_tiles: int
    """of all prefill chunks; 0 where none is computed"""
    tile_size: int
    """tokens of a tile"""
    max_seqlen_q: int
    """most tokens of one row"""
    max_seqlen_k: int
    """longest context"""


class Step(NamedTuple):
    """Rows that decode first, then rows that prefill; tokens lie one row behind the other.

    Names and meaning are those of flash-attn's arguments. A padded row has context length 0, and
    a padded token slot -1: nothing is read or stored for it.
    """

    shape: Shape
    input_ids: Tensor
    """int64 [num_tokens]"""
    positions: Tensor
    """int64 [num_tokens]: index of each token in its sequence"""
    slot_mapping: Tensor
    """int64 [num_tokens]: block id * block_size + offset, where each token's KV goes"""
    cu_seqlens_q: Tensor
    """int32 [num_rows + 1]: where each row's tokens begin"""
    cu_seqlens_k: Tensor
    """int32 [num_rows + 1]: sums of `context_lens`"""
    context_lens: Tensor
    """int32 [num_rows]: length of each sequence with this step's tokens"""
    decode_lens: Tensor
    """int32 [num_decode]: likewise of the rows that decode, 0 for others"""
    tiles: Tensor
    """int32 [num_tiles, 2]: row and first token in the row; -1 for a padded tile"""
    block_tables: Tensor
    """int32 [num_rows, max_blocks]"""
