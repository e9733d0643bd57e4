"""Attention over a paged KV cache in torch, for any mix of prefill chunks and decode.

Causal softmax attention (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762). Groups of query
heads share a key-value head (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245). Keys and
values lie in blocks (Kwon et al. 2023, https://arxiv.org/abs/2309.06180). The arguments have
flash-attn's names and meaning.

A token's result has the same bits for every batch and every chunking of its sequence. Keys are
processed in tiles of a fixed length, and the tiles are added in order. Keys beyond a token's own
position have weight 0, which changes no bit.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.argument_checks import check_tensor
from penstock.kernels.layouts.kv_cache import KVCache
from penstock.kernels.linear.batch_invariant import batched_product, pad_rows
from penstock.kernels.matrices import FP8

KEY_TILE = 128
QUERY_TILE = 64
ROW_ALIGNMENT = 8


def attend(
    q: Tensor,
    kv_cache: KVCache,
    *,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
) -> Tensor:
    """Compute the attention of the tokens of a step, [num_tokens, num_heads, head_dim].

    q: [num_tokens, num_heads, head_dim]; the tokens of sequence i are cu_seqlens_q[i] to
    cu_seqlens_q[i + 1], the last tokens of the sequence (causal, aligned at the bottom right).
    kv_cache: includes this step's tokens; other slots have any content. cu_seqlens_q: int32
    [num_seqs + 1]. max_seqlen_q: maximum tokens of one sequence in the step. context_lens: int32
    [num_seqs], tokens of each sequence, including this step's. block_tables: int32 [num_seqs,
    max_blocks]. scale: factor of the scores.
    """
    num_seqs = context_lens.shape[0]
    check_tensor("q", q, (-1, -1, -1))
    num_tokens, num_heads, head_dim = q.shape
    kv_cache.check(q.dtype, -1, -1, head_dim)
    block_size, num_kv_heads = kv_cache.k.shape[1:3]
    check_tensor("cu_seqlens_q", cu_seqlens_q, (num_seqs + 1,), torch.int32)
    check_tensor("context_lens", context_lens, (num_seqs,), torch.int32)
    check_tensor("block_tables", block_tables, (num_seqs, -1), torch.int32)
    if num_heads % num_kv_heads:
        raise ValueError(
            f"q: got {num_heads} heads, expected a multiple of the {num_kv_heads} KV heads"
        )
    if num_tokens > num_seqs * max_seqlen_q:
        raise ValueError(
            f"q: got {num_tokens} tokens, expected at most {num_seqs} times {max_seqlen_q}"
        )
    k_scale, v_scale = kv_cache.scales or (None, None)
    grouped = (q * scale).view(num_tokens, num_kv_heads, -1, head_dim).transpose(0, 1).contiguous()
    out = torch.empty_like(grouped)
    keys, values = _Tiles(kv_cache.k, k_scale, q.dtype), _Tiles(kv_cache.v, v_scale, q.dtype)
    pieces = keys.pieces(block_tables)
    bounds = cu_seqlens_q.tolist()
    for seq, context_len in enumerate(context_lens.tolist()):
        begin, end = bounds[seq], bounds[seq + 1]
        _check_lengths(seq, end - begin, context_len, block_tables.shape[1] * block_size)
        tiles = pieces[seq].unbind(0)
        for first in range(begin, end, QUERY_TILE):
            tokens = slice(first, min(first + QUERY_TILE, end))
            position = context_len - end + first
            _attend_tile(grouped[:, tokens], keys, values, tiles, position, out[:, tokens])
    return out.transpose(0, 1).reshape(num_tokens, num_heads, head_dim)


def _check_lengths(seq: int, num_tokens: int, context_len: int, capacity: int) -> None:
    if not num_tokens <= context_len <= capacity:
        raise ValueError(
            f"context_lens[{seq}]: got {context_len}, expected at least {num_tokens}, the tokens "
            f"in the step, and at most {capacity}, the tokens that its blocks hold"
        )


class _Tiles:
    """Tiles of KEY_TILE tokens of a cache, as [num_kv_heads, KEY_TILE, head_dim].

    A tile consists of pieces. The number of tokens of a piece divides both a block and a tile.
    """

    def __init__(self, cache: Tensor, scale: Tensor | None, dtype: torch.dtype) -> None:
        """Allocate a buffer.

        scale: scales of an FP8 cache, or None. dtype: element type of the tiles.
        """
        num_blocks, block_size, num_kv_heads, head_dim = cache.shape
        self._piece = math.gcd(block_size, KEY_TILE)
        self._pieces_per_block = block_size // self._piece
        self._dtype, self._scale = dtype, None
        if scale is not None:
            self._scale = scale.view(num_blocks, num_kv_heads, -1, self._piece)
            cache = cache.view(torch.uint8)  # every device can index this type
        self._source = cache.view(-1, self._piece * num_kv_heads * head_dim)
        self._buffer = self._source.new_empty(KEY_TILE // self._piece, self._source.shape[1])
        self._tile = self._buffer.view(KEY_TILE, num_kv_heads, head_dim).transpose(0, 1)

    def pieces(self, block_tables: Tensor) -> Tensor:
        """Return the indices of the pieces, int64 [num_seqs, num_tiles, pieces per tile].

        The last tile is padded with piece 0, whose keys are masked.
        """
        offsets = torch.arange(self._pieces_per_block, device=block_tables.device)
        pieces = (block_tables.long().unsqueeze(2) * self._pieces_per_block + offsets).flatten(1)
        per_tile = KEY_TILE // self._piece
        padded = functional.pad(pieces, (0, -pieces.shape[1] % per_tile))
        return padded.view(len(padded), -1, per_tile)

    def read(self, pieces: Tensor) -> Tensor:
        torch.index_select(self._source, 0, pieces, out=self._buffer)
        if self._scale is None:
            return self._tile
        blocks, places = pieces // self._pieces_per_block, pieces % self._pieces_per_block
        scale = self._scale[blocks, :, places].transpose(0, 1).flatten(1)
        return (self._tile.view(FP8).float() * scale.unsqueeze(2)).to(self._dtype)


def _attend_tile(
    q: Tensor, keys: _Tiles, values: _Tiles, tiles: tuple[Tensor, ...], position: int, out: Tensor
) -> None:
    """Compute attention for successive tokens of one sequence, the first at `position`.

    q, out: [num_kv_heads, num_tokens, group, head_dim]. tiles: the pieces of each key tile.
    """
    num_kv_heads, num_tokens, group, head_dim = q.shape
    tiles = tiles[: -(-(position + num_tokens) // KEY_TILE)]
    rows = pad_rows(q.reshape(num_kv_heads, -1, head_dim), ROW_ALIGNMENT)
    num_rows = num_tokens * group
    scores = q.new_empty(len(tiles), num_kv_heads, rows.shape[1], KEY_TILE)
    for tile_scores, pieces in zip(scores.unbind(0), tiles, strict=True):
        batched_product(rows, keys.read(pieces).transpose(1, 2), tile_scores)
    by_token = (len(tiles), num_kv_heads, num_tokens, group, KEY_TILE)
    _mask_later_keys(scores[:, :, :num_rows].view(by_token), position)
    weights = scores.sub_(scores.amax((0, 3), keepdim=True)).exp_()
    weighted = torch.zeros_like(rows)
    for number, (tile_weights, pieces) in enumerate(zip(weights.unbind(0), tiles, strict=True)):
        tile = values.read(pieces)
        tile[:, position + num_tokens - number * KEY_TILE :] = 0  # may be no numbers
        batched_product(tile_weights, tile, weighted, add=True)
    # cumsum adds in order; the order of sum would depend on the number of tiles.
    total = weights.sum(-1, keepdim=True).cumsum(0)[-1]
    out.copy_((weighted / total)[:, :num_rows].view_as(out))


def _mask_later_keys(scores: Tensor, position: int) -> None:
    """Mask scores [num_tiles, num_kv_heads, num_tokens, group, KEY_TILE] of later keys.

    position: position of the first token in its sequence.
    """
    num_tiles, _, num_tokens, _, _ = scores.shape
    first_tile = position // KEY_TILE  # earlier tiles contain no later key
    keys = torch.arange(first_tile * KEY_TILE, num_tiles * KEY_TILE, device=scores.device)
    queries = torch.arange(position, position + num_tokens, device=scores.device)
    later = keys.view(-1, 1, 1, 1, KEY_TILE) > queries.view(-1, 1, 1)
    scores[first_tile:].masked_fill_(later, -math.inf)
