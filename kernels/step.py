"""The tokens of one step, as the model and its attention see them."""

from typing import NamedTuple

from torch import Tensor


class Step(NamedTuple):
    """Rows that decode first, then rows that prefill; tokens lie one row behind the other.

    Names and meaning are those of flash-attn's arguments. A padded row has context length 0, and
    its token slot -1: nothing is read or stored for it.
    """

    input_ids: Tensor
    """int64 [num_tokens]"""
    positions: Tensor
    """int64 [num_tokens]: index of each token in its sequence"""
    slot_mapping: Tensor
    """int64 [num_tokens]: block id * block_size + offset, where each token's KV goes"""
    cu_seqlens_q: Tensor
    """int32 [num_rows + 1]: where each row's tokens begin"""
    max_seqlen_q: int
    """most tokens of one row"""
    cu_seqlens_k: Tensor
    """int32 [num_rows + 1]: sums of `context_lens`"""
    max_seqlen_k: int
    """longest context"""
    context_lens: Tensor
    """int32 [num_rows]: length of each sequence with this step's tokens"""
    block_tables: Tensor
    """int32 [num_rows, max_blocks]"""
    num_decode: int
    """rows at the front that have one token each"""
