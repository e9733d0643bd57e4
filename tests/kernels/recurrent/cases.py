"""Sequences that go through the gated delta rule, and what a plain loop computes for them."""

import copy
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.layouts.forward_batch import SMALL_TILE, BatchShape, ForwardBatch
from penstock.kernels.layouts.states import States, pack_states
from tests.kernels.state_tensors import state_tensors

TAPS, WINDOW = 4, 8


class Sizes(NamedTuple):
    """Heads of a layer, and features of each."""

    key_heads: int
    heads: int
    size: int

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.heads) * self.size


class Weights(NamedTuple):
    """Parameters of a layer."""

    sizes: Sizes
    conv_weight: Tensor
    a_log: Tensor
    dt_bias: Tensor

    @classmethod
    def random(cls, sizes: Sizes, dtype: torch.dtype, device: str) -> "Weights":
        return cls(
            sizes,
            torch.randn(sizes.channels, TAPS, device=device).to(dtype),
            torch.rand(sizes.heads, device=device) * 4 - 2,
            torch.randn(sizes.heads, device=device),
        )


class Inputs(NamedTuple):
    """Inputs of some tokens."""

    qkv: Tensor
    gates: Tensor

    @classmethod
    def random(cls, num: int, sizes: Sizes, dtype: torch.dtype, device: str) -> "Inputs":
        qkv = torch.randn(num, sizes.channels, device=device).to(dtype)
        return cls(qkv, torch.randn(num, 2 * sizes.heads, device=device).to(dtype))


def loop(weights: Weights, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return the outputs of a sequence and the states after each token, one token at a time.

    In float64: [num_tokens, heads, size] and [num_tokens, heads, size, size].
    """
    (key_heads, heads, size), conv_weight, a_log, dt_bias = weights
    qkv, (b, a) = inputs.qkv.double(), inputs.gates.double().chunk(2, 1)
    padded = functional.pad(qkv, (0, 0, TAPS - 1, 0))
    parts = [padded[tap : tap + len(qkv)] * conv_weight[:, tap].double() for tap in range(TAPS)]
    q, k, v = functional.silu(sum(parts, torch.zeros_like(qkv))).split(
        [key_heads * size, key_heads * size, heads * size], 1
    )
    unit = [x.reshape(len(x), key_heads, size) for x in (q, k)]
    unit = [x * (x.square().sum(2, keepdim=True) + 1e-6).rsqrt() for x in unit]
    q, k = (x.repeat_interleave(heads // key_heads, 1) for x in unit)
    q, v = q * size**-0.5, v.reshape(len(v), heads, size)
    beta = b.sigmoid()
    decay = (-a_log.double().exp() * functional.softplus(a + dt_bias.double())).exp()
    s = qkv.new_zeros(heads, size, size)
    outputs, states = [], []
    for token in range(len(qkv)):
        s = s * decay[token, :, None, None]
        delta = (v[token] - torch.einsum("hkv,hk->hv", s, k[token])) * beta[token, :, None]
        s = s + k[token, :, :, None] * delta[:, None, :]
        outputs.append(torch.einsum("hkv,hk->hv", s, q[token]))
        states.append(s)
    return torch.stack(outputs), torch.stack(states)


class Row(NamedTuple):
    """Tokens of a sequence in a step; `num_right` of those that decode are not wrong drafts."""

    sequence: "Sequenced"
    count: int
    num_right: int = 0  # 0: a chunk of prefill


class Sequenced:
    """A sequence with its inputs, and the outputs that it got so far."""

    def __init__(self, weights: Weights, num: int, num_prompt: int = 0) -> None:
        dtype, device = weights.conv_weight.dtype, str(weights.conv_weight.device)
        self.inputs = Inputs.random(num, weights.sizes, dtype, device)
        self.num_prompt, self.position = num_prompt, 0
        self.outputs = torch.full(
            (num, weights.sizes.heads, weights.sizes.size), torch.nan, dtype=dtype
        )
        self.read = -1  # block that the next step reads
        self.blocks: list[int] = []

    @property
    def left(self) -> int:
        return len(self.outputs) - self.position

    def again(self, num_prompt: int | None = None) -> "Sequenced":
        """Return a sequence with the same inputs that has not begun."""
        other = copy.copy(self)
        other.outputs, other.blocks = torch.full_like(self.outputs, torch.nan), []
        other.read, other.position = -1, 0
        other.num_prompt = self.num_prompt if num_prompt is None else num_prompt
        return other

    def drafted(self, random: Random, keep: int = 0) -> "Row":
        """Return a row with a random number of tokens and wrong drafts; leave `keep` tokens."""
        count = random.randint(1, WINDOW)
        return Row(self, count, min(random.randint(1, count), self.left - keep))


class Layer:
    """A layer's state blocks, which hold NaN where nothing was written, and its steps."""

    def __init__(self, weights: Weights, num_blocks: int, rule: object) -> None:
        self.weights, self._rule, self.num_used = weights, rule, 0
        heads, channels = weights.sizes.heads, weights.sizes.channels
        shapes = [
            (heads, weights.sizes.size, weights.sizes.size),
            (TAPS - 1, channels),
            (WINDOW, channels),
            (heads, WINDOW, 2),
        ]
        self.device = weights.conv_weight.device
        state = state_tensors(num_blocks + 1, shapes, self.device)
        positions = torch.zeros(num_blocks + 1, 2, dtype=torch.int32, device=self.device)
        self.states = States(positions, [state])

    def new_block(self) -> int:
        self.num_used += 1
        return self.num_used - 1

    def step(
        self, rows: Sequence[Row], *, num_padded: int = 0, tile_size: int = SMALL_TILE
    ) -> None:
        """Run a step: rows that decode first, then chunks of prefill."""
        wrong = Inputs.random(
            sum(row.count for row in rows) + num_padded,
            self.weights.sizes, self.weights.conv_weight.dtype, str(self.device),
        )  # fmt: skip
        qkv, gates = wrong
        read, written, starts, counts, ends, prompts, tiles = ([] for _ in range(7))
        token = 0
        for sequence, count, num_right in rows:
            block = self._written(sequence)
            position, right = sequence.position, num_right or count
            for tensor, given in zip((qkv, gates), sequence.inputs, strict=True):
                tensor[token : token + right] = given[position : position + right]
            for start in range(position, position + count, 1 if num_right else count):
                if not num_right:
                    tiles += [(len(starts), first) for first in range(0, count, tile_size)][::-1]
                starts.append(start)
                counts.append(1 if num_right else count)
                ends.append(start + counts[-1])
                read.append(sequence.read)
                written.append(block)
                prompts.append(sequence.num_prompt)
            token += count
        out = self._run(
            wrong, read, written, starts, counts, prompts, tiles,
            num_decode=sum(row.count for row in rows if row.num_right), num_padded=num_padded,
            tile_size=tile_size,
        ).cpu()  # fmt: skip
        token, row_index = 0, 0
        for sequence, count, num_right in rows:
            right, position = num_right or count, sequence.position
            sequence.outputs[position : position + right] = out[token : token + right]
            sequence.position, sequence.read = position + right, written[row_index]
            token, row_index = token + count, row_index + (count if num_right else 1)

    def _written(self, sequence: Sequenced) -> int:
        if not sequence.blocks:
            sequence.blocks = [self.new_block(), self.new_block()]
        first, second = sequence.blocks
        return second if sequence.read == first else first

    def _run(
        self,
        inputs: Inputs,
        read: list[int],
        written: list[int],
        starts: list[int],
        counts: list[int],
        prompts: list[int],
        tiles: list[tuple[int, int]],
        *,
        num_decode: int,
        num_padded: int,
        tile_size: int,
    ) -> Tensor:
        num_rows = len(starts) + num_padded
        tiles = tiles and [*tiles, (-1, -1)]
        shape = BatchShape(
            num_rows, len(inputs.qkv), num_rows if num_padded else num_decode, len(tiles),
            tile_size, max(counts), 0,
        )  # fmt: skip
        padding = [0] * num_padded
        start, count, prompt_end = (
            torch.tensor(numbers + padding).to(self.device) for numbers in (starts, counts, prompts)
        )
        ends = start + count
        first = torch.cat([count.new_zeros(1), torch.where(count > 0, count, 1).cumsum(0)]).int()
        index = torch.arange(num_rows, device=self.device)
        row_of = torch.repeat_interleave(index, first.diff(), output_size=len(inputs.qkv))
        token = torch.arange(len(inputs.qkv), device=self.device)
        packed = torch.tensor(
            [*(pack_states(*blocks) for blocks in zip(read, written, strict=True)), *padding]
        )
        packed = packed.int().to(self.device)
        step = self.states.begin(packed, first, ends.int(), prompt_end)
        decodes = (index < num_decode) & (ends > 0)
        batch = ForwardBatch(
            shape,
            input_ids=token,
            positions=start[row_of] + token - first[:-1][row_of],
            slot_mapping=token,
            cu_seqlens_q=first,
            cu_seqlens_k=first,
            context_lens=ends.int(),
            decode_lens=torch.where(decodes, ends, 0).int()[: shape.num_decode],
            tiles=torch.tensor(tiles or [(0, 0)]).int().to(self.device)[: len(tiles)],
            block_tables=first[None],
            states=step,
        )
        out = self._rule(  # type: ignore[operator]
            *inputs, *self.weights[1:], num_key_heads=self.weights.sizes.key_heads, batch=batch,
            state=self.states.layers[0],
        )  # fmt: skip
        self.states.end(step, decodes)
        return out  # type: ignore[no-any-return]

    def state_of(self, sequence: Sequenced) -> Tensor:
        """Return the recurrent state in the block that the sequence's last step wrote."""
        return self.states.layers[0][0][sequence.read].cpu()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over that of `expected`."""
    difference = actual.double().cpu() - expected.double().cpu()
    return float(difference.norm() / expected.double().cpu().norm())


def assert_right(weights: Weights, sequence: Sequenced) -> None:
    """Check a sequence's outputs so far, together and each alone.

    Those of sampled tokens have the precision of float32, those of a prompt that of TF32.
    """
    actual = sequence.outputs[: sequence.position]
    expected = loop(weights, sequence.inputs)[0][: sequence.position].cpu()
    limit = 1e-3 if sequence.num_prompt else 1e-5
    limit = limit if actual.dtype == torch.float32 else 5e-3
    errors = (actual.double() - expected).flatten(1).norm(dim=1)
    # a key may be orthogonal to its query
    size = max(float(expected.norm()) / len(expected) ** 0.5, 0.1)
    assert errors.norm() / len(errors) ** 0.5 < limit * size
    assert errors.max() < 5 * limit * size
