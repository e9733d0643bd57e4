"""CUDA graphs of whole steps, from embedding to sampled tokens."""

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.kernels.layouts.forward_batch import LARGE_TILE, MANY_TOKENS, SMALL_TILE, BatchShape
from penstock.kernels.layouts.step import APPENDED, HEADER, PARAMETERS, ROW
from penstock.models.layers import MoE
from penstock.models.model import Model
from penstock.models.parallel import Layer
from penstock.protocol.config import Config
from penstock.services.worker.drafter import DraftPasses

log = logging.getLogger(__name__)

PROGRESS = 10  # captured graphs between log lines
# Largest record of a step in a graph, in int32: 4 MiB, and up to four times as much pinned memory.
MAX_RECORD = 1 << 20
PREFILL_TOKENS = (64, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1536, 2048, 3072, 4096)
PREFILL_ROWS = (16, 64)  # numbers of rows of prefill graphs, in addition to max_num_seqs
# extra tiles of a prefill graph, for chunks that do not fill their last tile
SPARE_TILES = 16
# FLOPs of a GPU while the host launches the kernels of a step without a graph, 20 ms beside other
# work (H200, 8B). A graph of a larger step saves nothing, and its padding costs time.
LAUNCH_FLOPS = 1.6e13


class Computed(NamedTuple):
    """Results of a step on the device."""

    tokens: Tensor  # int64 [num_rows]; undefined for rows that do not sample
    logits: Tensor  # this rank's shard, float32: see `VocabParallelEmbedding.logits`
    hidden_states: Tensor  # [num_tokens, hidden_size]
    rows: tuple[Tensor, Tensor, Tensor]  # slots, positions and newest tokens of the rows
    # overwrites the logits and tokens of deferred rows; None with several GPUs
    sample_deferred: Callable[[], None] | None = None
    # makes drafts, once all tokens are sampled; None without multi-token prediction
    drafts: DraftPasses | None = None


Compute = Callable[[Tensor, BatchShape], Computed]  # (record, shape) → results


def graph_shapes(config: Config, model: Model, max_model_len: int) -> list[BatchShape]:
    """Return the shapes of all graphs of a model; none if its steps run without graphs."""
    if not (config.enable_cuda_graphs and model.attention.can_be_captured):
        return []
    shapes = decode_shapes(config.max_num_seqs, max_model_len)
    if model.attention.can_capture_prefill:
        parts = list(model.model.layers.modules())
        num_weights = sum(part.weight.shape.numel() for part in parts if isinstance(part, Layer))
        num_weights -= sum(moe.num_idle_weights for moe in parts if isinstance(moe, MoE))
        sizes = config.max_num_seqs, config.max_num_batched_tokens
        shapes += prefill_shapes(*sizes, num_weights, max_model_len)
    return shapes


def decode_shapes(max_num_seqs: int, max_seqlen_k: int) -> list[BatchShape]:
    """Return shapes of padded batch sizes: 1, 2, 4, multiples of 8 to 256, then of 16."""
    steps = [1, 2, 4, *range(8, 257, 8), *range(272, max_num_seqs + 16, 16)]
    sizes = [*(size for size in steps if size < max_num_seqs), max_num_seqs]
    return [BatchShape(size, size, size, 0, SMALL_TILE, 1, max_seqlen_k) for size in sizes]


def prefill_shapes(
    max_num_seqs: int, max_tokens: int, num_weights: int, max_seqlen_k: int
) -> list[BatchShape]:
    """Return shapes of steps with prefill and decode rows for which graphs save time.

    num_weights: number of weights that are multiplied with each token.
    """
    most = min(max_tokens, LAUNCH_FLOPS / (2 * num_weights))
    tokens = [number for number in PREFILL_TOKENS if number <= most]
    rows = [*(number for number in PREFILL_ROWS if number < max_num_seqs), max_num_seqs]
    sizes = dict.fromkeys((min(pair), pair[1]) for pair in product(rows, tokens))
    return [
        _prefill_shape(*size, tile, max_seqlen_k)
        for size in sizes
        for tile in tile_sizes(*size, max_num_seqs)
    ]


def tile_sizes(num_rows: int, num_tokens: int, max_num_seqs: int) -> list[int]:
    """Return the tiles of graphs of a size. Large tiles have graphs of few sizes."""
    small = [SMALL_TILE] if num_tokens <= MANY_TOKENS else []
    is_large = num_tokens >= LARGE_TILE and num_rows > min(PREFILL_ROWS[0], max_num_seqs - 1)
    return small + [LARGE_TILE] * is_large


def _prefill_shape(num_rows: int, num_tokens: int, tile_size: int, max_seqlen_k: int) -> BatchShape:
    return BatchShape(
        num_rows,
        num_tokens,
        num_decode=num_rows,
        num_tiles=num_tokens // SMALL_TILE + min(num_rows, SPARE_TILES),
        tile_size=tile_size,
        max_seqlen_q=num_tokens,
        max_seqlen_k=max_seqlen_k,
    )


class CudaGraphs:
    """CUDA graphs by shape, with a common memory pool. A graph is captured at its first use."""

    def __init__(
        self,
        compute: Compute,
        shapes: Iterable[BatchShape],
        device: torch.device,
        max_blocks: int,
        other_threads: bool = False,
    ) -> None:
        """Allocate a record for rows of `max_blocks`. `other_threads` may use the device."""
        self._error_mode = "thread_local" if other_threads else "global"
        self._compute = compute
        self._shapes = sorted(shapes, key=order)
        largest = max(_record_size(shape, max_blocks) for shape in self._shapes)
        self._record = torch.zeros(largest, dtype=torch.int32, device=device)
        self._graphs: dict[BatchShape, Any] = {}
        self._computed: dict[BatchShape, Computed] = {}
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def prefill_sizes(self) -> list[int]:
        """The numbers of tokens to which steps with prefill are padded, ascending."""
        return sorted({shape.num_tokens for shape in self._shapes if shape.num_tiles})

    def capture_all(self) -> Iterator[None]:
        """Capture all graphs, and yield after each.

        The largest graph comes first, so that smaller graphs fit into its memory. No graph writes
        to the KV cache, because its record has no row. Each graph is replayed once: the first
        launch takes memory from the driver, which may be slow while another worker's memory is
        freed.
        """
        for shape in reversed(self._shapes):
            self._capture(shape)
            self._graphs[shape].replay()
            _run_rest(self._computed[shape])
            yield
            if len(self._graphs) % PROGRESS == 0:
                log.info("CUDA graphs: %d of %d", len(self._graphs), len(self._shapes))
        # allocate pinned memory for records of every size, which torch caches
        for bits in range(len(self._record).bit_length() + 1):
            torch.empty(1 << bits, dtype=torch.int32, pin_memory=True)
        log.info("captured %d CUDA graphs", len(self._shapes))

    def _capture(self, shape: BatchShape) -> None:
        self._record.zero_()  # an empty record: the step reads and writes no row
        # run once without capture, for one-time compilation and allocation
        _run_rest(self._compute(self._record, shape))
        torch.cuda.synchronize(self._record.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode=self._error_mode):
            computed = self._compute(self._record, shape)
        deferred, drafts = computed.sample_deferred, computed.drafts
        self._computed[shape] = Computed(
            computed.tokens,
            _borrowed(computed.logits),
            _borrowed(computed.hidden_states),
            computed.rows,
            deferred and self._captured(deferred),
            drafts and DraftPasses(*map(self._captured, drafts)),
        )
        self._graphs[shape] = graph

    def _captured(self, rest: Callable[[], None]) -> Callable[[], None]:
        """Return the replay of a graph of its own."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode=self._error_mode):
            rest()
        return graph.replay

    def replay(self, record: Any, shape: BatchShape) -> Computed | None:
        """Run a step with a graph. Return None if no graph fits.

        record: int32 array. Results are padded to the graph's shape and last until the next replay.
        """
        chosen = choose(self._shapes, shape)
        if chosen is None or len(record) > len(self._record):
            return None
        if chosen not in self._graphs:
            self._capture(chosen)
        self._record[: len(record)].copy_(torch.from_numpy(record).pin_memory(), non_blocking=True)
        self._graphs[chosen].replay()
        return self._computed[chosen]


def _run_rest(computed: Computed) -> None:
    """Run all functions that may follow a step, in order."""
    for rest in (computed.sample_deferred, *(computed.drafts or ())):
        if rest:
            rest()


class _Memory:
    """The CUDA array interface (Numba's, version 2) of a tensor's memory, for `torch.as_tensor`."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.itemsize for stride in tensor.stride()),
            "typestr": f"<i{tensor.itemsize}",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


def _borrowed(tensor: Tensor) -> Tensor:
    """Return a view that does not own its memory, so that all graphs may share the memory."""
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)


def order(shape: BatchShape) -> tuple[bool, int, int]:
    """Return a sort key by cost. Padded tokens cost more than padded rows."""
    return shape.num_tiles > 0, shape.num_tokens, shape.num_rows


def choose(shapes: list[BatchShape], shape: BatchShape) -> BatchShape | None:
    """Return the first graph shape, in the `order` of `shapes`, that fits a step of `shape`."""
    first = bisect_left(shapes, order(shape), key=order)
    return next((graph for graph in shapes[first:] if _fits(shape, graph)), None)


def _fits(shape: BatchShape, graph: BatchShape) -> bool:
    """Return whether a graph of shape `graph` can compute a step of `shape`."""
    return (
        shape.num_rows <= graph.num_rows
        and shape.num_tokens <= graph.num_tokens
        and shape.num_tiles <= graph.num_tiles
        and (shape.num_tiles > 0) == (graph.num_tiles > 0)
        and (shape.tile_size == graph.tile_size or not shape.num_tiles)
    )


def _record_size(shape: BatchShape, max_blocks: int) -> int:
    """Return the maximum record size of a step, if all its rows are new, up to MAX_RECORD.

    Steps with longer records run without a graph.
    """
    per_row = ROW + PARAMETERS + max_blocks * APPENDED
    return min(HEADER + shape.num_rows * per_row + shape.num_tokens, MAX_RECORD)
