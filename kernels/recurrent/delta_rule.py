"""Gated DeltaNet (Yang et al. 2024, https://arxiv.org/abs/2412.06464): linear attention with state.

Queries, keys and values go through a causal depthwise convolution and SiLU. Each value head has a
state S [key_dim, value_dim], which a token with key k and value v changes by the delta rule:

    S = exp(g) * S;  S = S + outer(k, beta * (v - S^T k));  output = S^T q

There is one order of arithmetic, so bits do not depend on chunked prefill, caching, preemption or a
death. The tokens of a prompt are computed in chunks of CHUNK that begin at multiples of CHUNK from
the sequence's start. Sampled tokens are computed one by one, also when they are computed again. On
a CPU each chunk and each token of a sequence is computed in calls of its own; compiled layers
compute all tokens one by one (`penstock.kernels.cpu.llvm_delta`).

`penstock.kernels.layouts.states` describes the state blocks and the late commit of a decoding row.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.argument_checks import check_blocks, check_tensor
from penstock.kernels.elementwise import rms_norm
from penstock.kernels.layouts.forward_batch import ForwardBatch

CHUNK = 64  # tokens; a divisor of `STATE_CHUNK` of penstock.protocol.messages.plan
NORM_EPS = 1e-6  # of queries and keys
MAX_SOFTPLUS = 20.0  # as in torch: larger numbers stay as they are


class State(NamedTuple):
    """The state of a layer, float32; the first dimension is the block.

    The blocks of all tensors are equally far apart.
    """

    recurrent: Tensor  # [blocks, value_heads, key_dim, value_dim]
    inputs: Tensor  # [blocks, kernel - 1, channels]: last inputs of the convolution, oldest first
    window_inputs: Tensor  # [blocks, window, channels]: inputs of the window's tokens
    window_gates: Tensor  # [blocks, value_heads, window, 2]: beta and g of the window's tokens


def gated_delta_rule(
    qkv: Tensor,
    gates: Tensor,
    conv_weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    *,
    num_key_heads: int,
    batch: ForwardBatch,
    state: Sequence[Tensor],
) -> Tensor:
    """Return the outputs of a step's tokens, [num_tokens, value_heads, value_dim], in qkv's dtype.

    Updates the state blocks that the step's rows write. qkv: [num_tokens, channels], inputs of the
    convolution: queries and keys [num_key_heads * key_dim] each, values [value_heads * value_dim].
    Rows may be apart. gates: [num_tokens, 2 * value_heads]: b, then a; beta = sigmoid(b), g =
    -exp(a_log) * softplus(a + dt_bias). conv_weight: [channels, kernel]. a_log, dt_bias: float32
    [value_heads]. state: tensors of `State`. On a GPU, `value_dim` is `key_dim`, a power of two.
    """
    layer = State(*state)
    num_heads, key_dim, value_dim = layer.recurrent.shape[1:]
    num_channels = 2 * num_key_heads * key_dim + num_heads * value_dim
    check_tensor("qkv", qkv, (-1, num_channels))
    check_tensor("gates", gates, (len(qkv), 2 * num_heads), qkv.dtype)
    check_tensor("conv_weight", conv_weight, (num_channels, layer.inputs.shape[1] + 1), qkv.dtype)
    check_tensor("a_log", a_log, (num_heads,), torch.float32)
    check_tensor("dt_bias", dt_bias, (num_heads,), torch.float32)
    check_blocks(State._fields, state, layer.recurrent.stride(0))
    if num_heads % num_key_heads:
        raise ValueError(
            f"num_key_heads: got {num_key_heads}, expected a divisor of {num_heads} value heads"
        )
    if qkv.is_cuda:
        from penstock.kernels.recurrent import triton_delta_rule

        tensors = qkv, gates, conv_weight, a_log, dt_bias
        launch = triton_delta_rule.gated_delta_rule
        return launch(*tensors, num_key_heads=num_key_heads, batch=batch, state=state)
    sequences = list(_sequences(batch))
    inputs = _inputs(qkv, sequences, layer)
    q, k, v = _convolved(inputs, conv_weight, num_key_heads, key_dim, value_dim)
    beta, g = _gates(gates, a_log, dt_bias)
    out = qkv.new_empty(len(qkv), num_heads, value_dim)
    scratch = torch.empty_like(layer.recurrent[0]), torch.empty_like(layer.recurrent[0])
    num_before, begin = layer.inputs.shape[1], 0
    for sequence in sequences:
        end = begin + sequence.num_window + sequence.num_tokens
        of_step = slice(sequence.begin, sequence.end)
        if sequence.written >= 0:
            _store_inputs(layer, sequence, inputs[begin : end + num_before], beta, g)
        tokens = _Tokens(
            q[begin:end],
            k[begin:end],
            v[begin:end],
            *_with_window(layer, sequence, beta[of_step], g[of_step]),
        )
        _compute(layer.recurrent, sequence, tokens, out[of_step], *scratch)
        begin = end + num_before
    return out


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `rms_norm(x) * silu(z)` for x, z [num_tokens, heads, size] and weight [size].

    On a GPU x is contiguous, and so are the tokens of z.
    """
    check_tensor("z", z, tuple(x.shape), x.dtype)
    check_tensor("weight", weight, (x.shape[2],), x.dtype)
    if x.is_cuda:
        from penstock.kernels.recurrent import triton_gated_norm

        return triton_gated_norm.gated_rms_norm(x, z, weight, eps)
    normed = rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)
    return (normed * _silu(z.float())).to(x.dtype)


class _Sequence(NamedTuple):
    """A sequence's tokens in a step."""

    read: int  # state block, or -1: zeros
    written: int  # state block, or -1: none
    num_window: int  # tokens of the window that the state gets first
    begin: int  # index of the first token in the step
    end: int
    first: int  # position of the first token
    num_prompt: int  # leading tokens that are computed in chunks
    decodes: bool

    @property
    def num_tokens(self) -> int:
        return self.end - self.begin


class _Tokens(NamedTuple):
    """Float32 numbers of tokens; a head of queries and keys has several value heads."""

    q: Tensor  # [num_tokens, key_heads, key_dim]
    k: Tensor
    v: Tensor  # [num_tokens, value_heads, value_dim]
    beta: Tensor  # [num_tokens, value_heads]
    g: Tensor


def _sequences(batch: ForwardBatch) -> Iterator[_Sequence]:
    """Yield the sequences of a step in order, with the rows of a draft together."""
    step = batch.states
    if step is None:
        raise ValueError("batch.states: got None, expected the state blocks of the rows")
    bounds, num_decode = batch.cu_seqlens_q.tolist(), int(batch.decode_lens.count_nonzero())
    columns = step.read, step.written, step.window, step.first, step.prompt_end
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    row = 0
    while row < len(rows):
        read, written, num_window, first, prompt_end = rows[row]
        last, decodes = row + 1, row < num_decode
        while decodes and written >= 0 and last < num_decode and rows[last][1] == written:
            last += 1
        begin, end = bounds[row], bounds[last]
        num_prompt = 0 if decodes else min(max(prompt_end - first, 0), end - begin)
        yield _Sequence(read, written, num_window, begin, end, first, num_prompt, decodes)
        row = last


def _inputs(qkv: Tensor, sequences: list[_Sequence], layer: State) -> Tensor:
    """Return the convolution's inputs: before each sequence's window, of its window and tokens."""
    zeros = layer.inputs.new_zeros(layer.inputs.shape[1], qkv.shape[1])
    pieces = []
    for sequence in sequences:
        if sequence.read < 0:
            pieces.append(zeros)
        else:
            pieces.append(layer.inputs[sequence.read])
            if num := sequence.num_window:
                pieces.append(layer.window_inputs[sequence.read, :num])
        pieces.append(qkv[sequence.begin : sequence.end].float())
    return torch.cat(pieces)


def _convolved(
    inputs: Tensor, conv_weight: Tensor, num_key_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return normalised queries and keys, and values. Rows between sequences have no meaning."""
    weight = conv_weight.float().t().contiguous()
    number = len(inputs) - len(weight) + 1
    total = inputs[:number] * weight[0]
    for place, factor in enumerate(weight[1:], 1):
        # A fused multiply-add would depend on the element's place in a vector.
        total += inputs[place : place + number] * factor
    size = num_key_heads * key_dim
    q, k, v = torch.split(_silu(total), [size, size, inputs.shape[1] - 2 * size], 1)
    q, k = (_normalized(part.reshape(number, num_key_heads, key_dim)) for part in (q, k))
    return q * key_dim**-0.5, k, v.reshape(number, -1, value_dim)


def _normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))  # unlike torch's function, with the same bits for any shape


def _gates(gates: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return beta and g of the step's tokens, float32 [num_tokens, value_heads]."""
    b, a = gates.float().chunk(2, dim=1)
    a = a + dt_bias
    softplus = torch.where(a > MAX_SOFTPLUS, a, torch.log1p(torch.exp(a.clamp(max=MAX_SOFTPLUS))))
    return 1 / (1 + torch.exp(-b)), -torch.exp(a_log) * softplus


def _with_window(
    layer: State, sequence: _Sequence, beta: Tensor, g: Tensor
) -> tuple[Tensor, Tensor]:
    """Return beta and g of the window's tokens, then of the step's tokens."""
    if not sequence.num_window:
        return beta, g
    window = layer.window_gates[sequence.read, :, : sequence.num_window].permute(2, 1, 0)
    return torch.cat([window[0], beta]), torch.cat([window[1], g])


def _store_inputs(
    layer: State, sequence: _Sequence, inputs: Tensor, beta: Tensor, g: Tensor
) -> None:
    """Store the inputs before the state's position, and the window of a decoding sequence."""
    written, num_tokens = sequence.written, sequence.num_tokens
    num_before = layer.inputs.shape[1]
    if not sequence.decodes:
        layer.inputs[written] = inputs[-num_before:]
        return
    layer.inputs[written] = inputs[-num_before - num_tokens : -num_tokens]
    layer.window_inputs[written, :num_tokens] = inputs[-num_tokens:]
    of_step = slice(sequence.begin, sequence.end)
    layer.window_gates[written, :, :num_tokens, 0] = beta[of_step].t()
    layer.window_gates[written, :, :num_tokens, 1] = g[of_step].t()


def _compute(
    states: Tensor,
    sequence: _Sequence,
    tokens: _Tokens,
    out: Tensor,
    draft: Tensor,
    product: Tensor,
) -> None:
    """Write the outputs of a sequence's tokens to `out`, and its state to its block.

    draft, product: memory of a state each.
    """
    kept = states[sequence.written] if sequence.written >= 0 else draft
    state = states[sequence.read] if sequence.read >= 0 else kept.zero_()
    num_window = sequence.num_window
    if not num_window:
        state = kept.copy_(state)
    for token in range(num_window):
        one = _Token.of(tokens, token)
        state = one.add(state, one.delta(state, product), kept)
    begin, end = num_window, num_window + sequence.num_prompt
    while begin < end:
        position = sequence.first + begin - num_window
        stop = min(begin + CHUNK - position % CHUNK, end)
        chunk = _Tokens(*(part[begin:stop] for part in tokens))
        out[begin - num_window : stop - num_window] = _chunk(kept, chunk)
        begin = stop
    for token in range(end, len(tokens.v)):
        one = _Token.of(tokens, token)
        delta = one.delta(state, product)
        out[token - num_window] = one.output(state, delta, product)
        if not sequence.decodes:
            state = one.add(state, delta, kept)
        elif token + 1 < len(tokens.v):  # the next step adds these tokens to the kept state
            state = one.add(state, delta, draft)


class _Token(NamedTuple):
    """Numbers of one token, by value head."""

    q: Tensor  # [value_heads, key_dim, 1]
    k: Tensor
    v: Tensor  # [value_heads, value_dim]
    beta: Tensor  # [value_heads, 1]
    decay: Tensor

    @classmethod
    def of(cls, tokens: _Tokens, index: int) -> "_Token":
        """Return a token, with queries and keys for each value head."""
        group = tokens.v.shape[1] // tokens.k.shape[1]
        q, k = (
            part[index].repeat_interleave(group, 0).unsqueeze(2) for part in (tokens.q, tokens.k)
        )
        beta, g = tokens.beta[index].unsqueeze(1), tokens.g[index].unsqueeze(1)
        return cls(q, k, tokens.v[index], beta, g.exp())

    def delta(self, state: Tensor, product: Tensor) -> Tensor:
        """Return what the token adds under its key, [value_heads, value_dim]."""
        found = torch.mul(state, self.k, out=product).sum(1)
        return self.beta * (self.v - self.decay * found)

    def add(self, state: Tensor, delta: Tensor, out: Tensor) -> Tensor:
        """Return the state after the token, in the memory `out`."""
        return torch.mul(state, self.decay.unsqueeze(2), out=out).addcmul_(
            self.k, delta.unsqueeze(1)
        )

    def output(self, state: Tensor, delta: Tensor, product: Tensor) -> Tensor:
        """Return the output for the state before the token, without the state after it."""
        found = torch.mul(state, self.q, out=product).sum(1)
        return self.decay * found + (self.q * self.k).sum(1) * delta


def _chunk(state: Tensor, tokens: _Tokens) -> Tensor:
    """Return the outputs of a chunk, [num_tokens, value_heads, value_dim], and change its state.

    The WY representation (Yang et al. 2024, https://arxiv.org/abs/2406.06484, section 3): with the
    decay D[i, j] from token j to token i, the values U that the tokens add solve a triangular
    system, (I + tril(diag(beta) (K K^T * D), -1)) U = beta * (V - decay * K S).
    """
    group = tokens.v.shape[1] // tokens.k.shape[1]
    q, k = (part.transpose(0, 1).contiguous() for part in (tokens.q, tokens.k))
    beta, total = tokens.beta.t().unsqueeze(2), tokens.g.t().contiguous().cumsum(1)
    later = torch.ones(len(tokens.v), len(tokens.v), dtype=torch.bool, device=k.device).triu(1)
    decay = (total.unsqueeze(2) - total.unsqueeze(1)).masked_fill(later, -torch.inf).exp()
    transposed = k.transpose(1, 2)
    overlap, scores = ((part @ transposed).repeat_interleave(group, 0) * decay for part in (k, q))
    q, k = (part.repeat_interleave(group, 0) for part in (q, k))
    grown, left = total.exp().unsqueeze(2), (total[:, -1:] - total).exp().unsqueeze(2)
    values = beta * (tokens.v.transpose(0, 1) - grown * (k @ state))
    values = torch.linalg.solve_triangular(beta * overlap, values, upper=False, unitriangular=True)
    out = grown * (q @ state) + scores @ values
    state.mul_(grown[:, -1:]).add_((left * k).transpose(1, 2) @ values)
    return out.transpose(0, 1)  # type: ignore[no-any-return]
