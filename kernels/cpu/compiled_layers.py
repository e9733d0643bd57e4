"""Decoder layers on a CPU as compiled functions, in place of a torch call for each operation.

The functions compute in float32 what `penstock.kernels.attention`, `linear` and `elementwise`
compute in torch. Weights are float32, 16 bits or integers; each matrix may have a different kind.
The bits of a row depend neither on the other rows, nor on the chunks of its sequence, nor on the
number of threads.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.argument_checks import check_blocks, check_contiguous, check_tensor
from penstock.kernels.cpu.compiler import Target, host, load
from penstock.kernels.cpu.llvm_decoder import KEYS, Kinds, build_module
from penstock.kernels.cpu.llvm_products import Kind, integer_kind, scratch_words
from penstock.kernels.cpu.shared_memory import HALVES, WORDS, SharedMemory
from penstock.kernels.cpu.types import (
    ALL_MATRICES,
    STATE,
    HeadFields,
    LayerShape,
    LayerWeights,
    Matrix,
    StepFields,
)
from penstock.kernels.layouts.forward_batch import ForwardBatch
from penstock.kernels.layouts.kv_cache import KVCache
from penstock.kernels.packed.matrices import UNIT, Integers, fitting_group

# work below which another thread costs more than it saves, since it has to wake up
MIN_NANOSECONDS = 500_000
ROWS_OF_STATES = "read", "written", "first", "last", "window"  # in `StateStep` and `StepFields`
# kinds of matrices by element type
_KINDS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def unsupported(shape: LayerShape) -> str:
    """Return why these layers can't be compiled, or an empty string."""
    if shape.head_dim % KEYS:
        return f"head_dim: got {shape.head_dim}, expected a multiple of {KEYS}"
    if shape.intermediate % 2:
        return f"intermediate_size: got {shape.intermediate}, expected an even number"
    if (delta := shape.delta) and (delta.key_dim % KEYS or delta.value_dim % KEYS):
        found = f"got {delta.key_dim} and {delta.value_dim}, expected multiples of {KEYS}"
        return f"linear_key_head_dim and linear_value_head_dim: {found}"
    return ""


class CompiledLayers:
    """All layers of a rank, and the product with the output layer."""

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        shape: LayerShape,
        block_size: int,
        target: Target | None = None,
        *,
        head: Matrix | None = None,
        embedding: Tensor | None = None,
    ) -> None:
        """Compile for `target`, by default this CPU.

        head, embedding: weights of `logits` and `embed`; by default of the layers' kind, and
        float32.

        Raises ValueError for layers that can't be compiled, OSError if compiled code can't be run.
        """
        if reason := unsupported(shape):
            raise ValueError(reason)
        for layer in layers:
            _check_layer(layer, shape)
        found = (getattr(layer, name) for layer in layers for name in ALL_MATRICES)
        matrices = [matrix for matrix in found if matrix is not None]
        num_weights = sum(math.prod(matrix.shape) for matrix in matrices)
        self._half_weights = num_weights // (2 * len(layers))
        of_layers = tuple(dict.fromkeys(map(_kind_of, matrices)))
        self._head_kind = _kind_of(layers[0].qkv if head is None else head)
        self._embedding_dtype = torch.float32 if embedding is None else embedding.dtype
        self._layers = layers  # keeps the memory alive
        self._shape, self._block_size = shape, block_size
        kinds = Kinds(of_layers, self._head_kind, _KINDS[self._embedding_dtype])
        sizes = kinds, shape.head, shape.delta
        self._library = load(lambda cpu: str(build_module(cpu, *sizes)), repr(sizes), target)
        self._decoder = self._library.function("decoder", 6)
        self._head = self._library.function("head", 3)
        self._embed = self._library.function("embed", 5)
        self._max_threads, self._num_threads = torch.get_num_threads(), 1
        self._pool = ThreadPoolExecutor(max(1, self._max_threads - 1), "layers")
        self._addresses = [_addresses(layer, of_layers) for layer in layers]
        self._kv_caches: Sequence[KVCache] | None = None
        self._states: Sequence[Sequence[Tensor]] = ()
        self._scale, self._eps = (
            torch.tensor(number, dtype=torch.float32)
            for number in (shape.head_dim**-0.5, shape.eps)
        )
        self._barrier = torch.zeros(WORDS, dtype=torch.int64)
        self._scratch_words = scratch_words(target or host(), shape.inputs)
        if shape.delta:
            self._scratch_words = max(self._scratch_words, shape.delta.scratch_words)
        self._num_rows = 0
        self.version = 0  # changes with the memory addresses in StepFields and HeadFields
        self.reserve(1)

    @property
    def num_halves(self) -> int:
        """Number of computed halves of layers, modulo resets. Any thread may read it."""
        return int(self._barrier[HALVES])

    def reserve(self, num_rows: int) -> None:
        """Allocate memory for the intermediate results of a step with `num_rows` tokens."""
        if num_rows <= self._num_rows:
            return
        self._num_rows, shape = num_rows, self._shape
        self.version += 1
        qkvz, gates = (delta.width, 2 * delta.value_heads) if (delta := shape.delta) else (0, 0)
        self._normed, self._attended, self._inner, self._qkv, self._gates = (
            torch.empty(num_rows, size) for size in (*shape.inputs, max(shape.qkv, qkvz), gates)
        )
        self._scratch = torch.empty(self._max_threads, self._scratch_words)

    def begin(self, batch: ForwardBatch, rope: Tensor, kv_caches: Sequence[KVCache]) -> StepFields:
        """Prepare a step, whose keys and values will be stored in kv_caches.

        Within a block, the keys of a head are adjacent, so that attention reads memory in one
        stream.
        """
        num_tokens = batch.shape.num_tokens
        check_tensor("rope", rope, (-1, self._shape.head.rotated), torch.float32)
        states = batch.states.layers if batch.states else ()
        if kv_caches is not self._kv_caches or states is not self._states:
            self._use(kv_caches, states)
        self._num_tokens, shape = num_tokens, self._shape
        self.reserve(num_tokens)
        self._inputs = batch, rope  # keeps the memory alive
        self._fields = StepFields(
            num_tokens=num_tokens,
            num_rows=batch.shape.num_rows,
            normed=self._normed.data_ptr(),
            qkv=self._qkv.data_ptr(),
            gates=self._gates.data_ptr(),
            attended=self._attended.data_ptr(),
            inner=self._inner.data_ptr(),
            scratch=self._scratch.data_ptr(),
            scratch_size=self._scratch.shape[1],
            barrier=self._barrier.data_ptr(),
            positions=batch.positions.data_ptr(),
            slots=batch.slot_mapping.data_ptr(),
            starts=batch.cu_seqlens_q.data_ptr(),
            lengths=batch.context_lens.data_ptr(),
            tables=batch.block_tables.data_ptr(),
            max_blocks=batch.block_tables.stride(0),
            block_size=self._block_size,
            piece=math.gcd(self._block_size, KEYS),
            rope=rope.data_ptr(),
            scale=self._scale.data_ptr(),
            eps=self._eps.data_ptr(),
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            intermediate=shape.intermediate,
        )
        if step := batch.states:
            rows = {name: getattr(step, name) for name in ROWS_OF_STATES}
            for name, tensor in rows.items():
                check_tensor(name, tensor, (batch.shape.num_rows,), torch.int64)
            self._fields = self._fields._replace(
                num_decode=int(batch.decode_lens.count_nonzero()),
                state_stride=step.layers[0][0].stride(0),
                **{name: tensor.data_ptr() for name, tensor in rows.items()},
            )
        return self._fields

    def embed(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """Return the weight's rows for token_ids (int64) as float32; the ids are not checked."""
        check_tensor("token_ids", token_ids, (-1,), torch.int64)
        check_contiguous("token_ids", token_ids)
        check_tensor("weight", weight, (-1, self._shape.hidden), self._embedding_dtype)
        check_contiguous("weight", weight)
        out = torch.empty(len(token_ids), self._shape.hidden)
        self.call_embed([tensor.data_ptr() for tensor in (token_ids, weight, out)], len(token_ids))
        return out

    def call_embed(self, addresses: Sequence[int], number: int) -> None:
        """Compute `embed`; addresses: unchecked addresses of token_ids, weight and result."""
        self._embed(*addresses, number, self._shape.hidden)

    def run(
        self,
        halves: range,
        residual: Tensor,
        target: Tensor | None = None,
        ranks: SharedMemory | None = None,
    ) -> None:
        """Add halves of layers to the residual stream; layer i has the halves 2i and 2i + 1.

        residual: float32 [num_tokens, hidden]. target: receives the sums instead, with the same
        shape. ranks: shared memory of ranks whose products are added as well. Raises
        ConnectionError if a rank has exited.
        """
        target = residual if target is None else target
        for name, tensor in (("residual", residual), ("target", target)):
            check_tensor(name, tensor, (self._num_tokens, self._shape.hidden), torch.float32)
            check_contiguous(name, tensor)
        fields = self._fields._replace(residual=residual.data_ptr(), target=target.data_ptr())
        if ranks:
            fields = fields._replace(**ranks.fields(len(halves)))
        self.call_decoder(np.array(fields, np.int64).ctypes.data, halves, self._num_tokens)
        if ranks:
            ranks.check()

    def call_decoder(self, fields: int, halves: range, num_rows: int) -> None:
        """Compute `run`; fields: address of unchecked StepFields."""
        arguments = fields, self._table.data_ptr(), halves.start, halves.stop
        number = _num_threads(len(halves) * self._half_weights, num_rows)
        self._on_threads(number, self._decoder, *arguments)

    def logits(
        self, x: Tensor, norm: Tensor, eps: float, weight: Matrix, out: Tensor | None = None
    ) -> Tensor:
        """Compute `rms_norm(x) @ weight.T`, float32 [num_rows, columns]."""
        num_rows, size = x.shape
        check_tensor("x", x, (-1, self._shape.hidden), torch.float32)
        _check_matrix("weight", weight, (-1, size))
        if _kind_of(weight) != self._head_kind:
            raise ValueError(f"weight: got {_kind_of(weight)}, expected {self._head_kind}")
        check_tensor("norm", norm, (size,), torch.float32)
        x = x.contiguous()
        out = x.new_empty(num_rows, len(weight)) if out is None else out
        check_tensor("out", out, (num_rows, len(weight)), torch.float32)
        check_contiguous("out", out)
        epsilon = torch.tensor(eps, dtype=torch.float32)
        fields = self.head_fields(x, norm, epsilon, weight, out)
        self.call_head(np.array(fields, np.int64).ctypes.data, fields.columns, num_rows)
        return out

    def head_fields(
        self, x: Tensor, norm: Tensor, eps: Tensor, weight: Matrix, out: Tensor
    ) -> HeadFields:
        """Return the arguments of the compiled `logits`; the tensors must outlive them."""
        self.reserve(len(x))
        return HeadFields(
            x=x.data_ptr(),
            norm=norm.data_ptr(),
            eps=eps.data_ptr(),
            weight=_elements(weight).data_ptr(),
            scale=weight.scale.data_ptr() if isinstance(weight, Integers) else 0,
            out=out.data_ptr(),
            normed=self._normed.data_ptr(),
            scratch=self._scratch.data_ptr(),
            scratch_size=self._scratch.shape[1],
            barrier=self._barrier.data_ptr(),
            num_rows=len(x),
            size=x.shape[1],
            columns=len(weight),
        )

    def call_head(self, fields: int, columns: int, num_rows: int) -> None:
        """Compute `logits`; fields: address of unchecked HeadFields."""
        number = _num_threads(columns * self._shape.hidden, num_rows)
        self._on_threads(number, self._head, fields)

    def _on_threads(self, number: int, function: Callable[..., None], *arguments: int) -> None:
        """Call a function in threads; their number changes no bit of the results."""
        number = min(number, self._max_threads)
        if number != self._num_threads:
            self._num_threads = number
            # the barrier counts arrivals in multiples of the number of threads
            self._barrier.zero_()
        others = [
            self._pool.submit(function, *arguments, thread, self._num_threads)
            for thread in range(1, self._num_threads)
        ]
        function(*arguments, 0, self._num_threads)
        for other in others:
            other.result()

    def _use(self, kv_caches: Sequence[KVCache], states: Sequence[Sequence[Tensor]]) -> None:
        """Use these caches of layers with attention, and states of the others."""
        shape, caches, others = self._shape, iter(kv_caches), iter(states)
        table = []
        for layer, addresses in zip(self._layers, self._addresses, strict=True):
            memory = dict.fromkeys(("k_cache", "v_cache", *STATE), 0)
            if layer.conv is not None and shape.delta:
                tensors = next(others)
                shapes = shape.delta.state(len(tensors[0]))
                for name, tensor, size in zip(STATE, tensors, shapes, strict=True):
                    check_tensor(name, tensor, size, torch.float32)
                    memory[name] = tensor.data_ptr()
                check_blocks(STATE, tensors, states[0][0].stride(0))
            else:
                cache = next(caches)
                cache.check(torch.float32, self._block_size, shape.kv_heads, shape.head_dim)
                if cache.scales:
                    raise ValueError("kv_cache: got FP8, expected float32")
                memory |= {"k_cache": cache.k.data_ptr(), "v_cache": cache.v.data_ptr()}
            table.append([*addresses, *memory.values()])
        self._table = torch.tensor(table)
        self._kv_caches, self._states = kv_caches, states
        self.version += 1


def _addresses(layer: LayerWeights, kinds: tuple[Kind, ...]) -> list[int]:
    """Return the addresses of `LAYER` without the caches."""
    tensors = [None if matrix is None else _elements(matrix) for matrix in layer]
    matrices = [getattr(layer, name) for name in ALL_MATRICES]
    scales = [matrix.scale if isinstance(matrix, Integers) else None for matrix in matrices]
    numbers = [0 if matrix is None else kinds.index(_kind_of(matrix)) for matrix in matrices]
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in (*tensors, *scales)]
    return [*addresses, *numbers]


def _num_threads(num_weights: int, num_rows: int) -> int:
    """Return the number of threads worth their cost, by the time of one core with AVX-512."""
    return max(1, num_weights * (num_rows + 4) // 40 // MIN_NANOSECONDS)


def _elements(matrix: Matrix) -> Tensor:
    """Return the tensor of a matrix's elements."""
    return matrix.codes if isinstance(matrix, Integers) else matrix


def _kind_of(matrix: Matrix) -> Kind:
    """Return the kind of a matrix."""
    return integer_kind(matrix) if isinstance(matrix, Integers) else _KINDS[matrix.dtype]


def _check_layer(layer: LayerWeights, shape: LayerShape) -> None:
    """Raise ValueError unless the weights have these sizes."""
    inputs = shape.heads * shape.head_dim
    expected = {
        "input_norm": (shape.hidden,),
        "qkv": (shape.qkv, shape.hidden),
        "q_norm": (shape.head_dim,),
        "k_norm": (shape.head_dim,),
        "o": (shape.hidden, inputs),
        "post_norm": (shape.hidden,),
        "gate_up": (2 * shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
    }
    if layer.conv is not None and (delta := shape.delta):
        expected |= {
            "qkv": (delta.width, shape.hidden),
            "q_norm": (delta.value_dim,),
            "o": (shape.hidden, delta.outputs),
            "ba": (2 * delta.value_heads, shape.hidden),
            "conv": (delta.kernel, delta.channels),
            **dict.fromkeys(("a_log", "dt_bias"), (delta.value_heads,)),
        }
    for name, matrix in layer._asdict().items():
        if name in ALL_MATRICES and matrix is not None:
            _check_matrix(name, matrix, expected[name])
        elif matrix is not None:
            check_tensor(name, matrix, expected[name], torch.float32)
            check_contiguous(name, matrix)


def _check_matrix(name: str, matrix: Matrix, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a weight has this shape, and elements of a known type."""
    if not isinstance(matrix, Integers):
        check_tensor(name, matrix, shape, *_KINDS)
        check_contiguous(name, matrix)
        return
    codes, scale, columns = matrix.codes, matrix.scale, shape[-1]
    check_tensor(name, codes, (*shape[:-1], columns * matrix.bits // 8), torch.int8, torch.uint8)
    rest = (2,) if matrix.has_shift else ()
    check_tensor(f"{name}'s scale", scale, (len(codes), -1, *rest), torch.float32)
    groups = scale.shape[1]
    if columns % UNIT or fitting_group(columns, columns // groups) * groups != columns:
        raise ValueError(f"{name}'s scale: got {groups} groups of {columns} columns")
    check_contiguous(f"{name}'s scale", scale)
    check_contiguous(name, codes)
