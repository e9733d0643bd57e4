"""One rank of the model: weights, KV cache and persistent batch, and the step that joins them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.plan import StepBuffers, apply_plan, make_slots, make_step_buffers
from penstock.kernels.sampling import sample
from penstock.kernels.step import Shape
from penstock.models.qwen3 import Qwen3
from penstock.protocol.plan import BatchPlan
from penstock.services.worker.cuda_graphs import CudaGraphs
from penstock.services.worker.idle_times import IdleTimes
from penstock.services.worker.persistent_batch import NONE, Integers, PersistentBatch, Record


class LaunchedStep:
    """A step that was launched: its tokens are on their way to the host."""

    def __init__(self, tokens: Tensor, sampled: Integers, event: Any = None) -> None:
        """tokens: int64, in host memory; there behind `event`, a torch.cuda.Event, if it is given.

        sampled: which of `tokens` were sampled, in ascending order of slot.
        """
        self._tokens = tokens
        self._sampled = sampled
        self._event = event

    def done(self) -> bool:
        """Whether `token_ids` answers without waiting."""
        return self._event is None or bool(self._event.query())

    def token_ids(self) -> list[int]:
        """The sampled tokens."""
        if self._event is not None:
            self._event.synchronize()
        ids: list[int] = self._tokens.numpy()[self._sampled].tolist()
        return ids


class ModelRunner:
    """Runs plans, in order, on the device where the KV cache is."""

    def __init__(
        self,
        model: Qwen3,
        batch: PersistentBatch,
        kv_cache: Tensor,
        num_slots: int,
        max_tokens: int,
    ) -> None:
        """max_tokens: most tokens of a step."""
        self.num_blocks = batch.num_blocks
        self.block_size = batch.block_size
        self._model = model
        self._batch = batch
        self._kv_cache = kv_cache
        self._device = device = kv_cache.device
        self._is_cuda = device.type == "cuda"
        self._slots = make_slots(num_slots, batch.max_blocks, device)
        self._buffers: StepBuffers = make_step_buffers(
            num_slots, batch.max_blocks, max(max_tokens, num_slots), device
        )
        self._graphs: CudaGraphs | None = None
        self._profiler: Any = None
        self._idle_times = IdleTimes() if self._is_cuda else None

    def idle_us(self) -> tuple[float, float]:
        """Median and 99th percentile of the GPU's wait between two steps; 0 on a CPU."""
        return self._idle_times.percentiles() if self._idle_times else (0.0, 0.0)

    def clear(self) -> None:
        """Forgets every sequence; the KV cache stays as it is."""
        self._batch.clear()

    def use_graphs(self, shapes: Iterable[Shape]) -> None:
        """Steps that fit into one of `shapes` are replayed from here on."""
        self._graphs = CudaGraphs(self._compute, shapes, self._device)

    @torch.inference_mode()
    def capture_graphs(self, on_progress: Callable[[], None]) -> None:
        """Captures all of them now, which each would be at its first use."""
        if self._graphs:
            self._graphs.capture_all(on_progress)

    def profile(self, profiler: Any) -> None:
        """Tells `profiler`, a torch.profiler.profile, of every step from here on."""
        self._profiler = profiler

    @torch.inference_mode()
    def launch(self, plan: BatchPlan) -> LaunchedStep:
        """Starts a step. Raises ValueError for a plan that can't be, GroupError."""
        self._batch.apply(plan)
        rows = self._batch.advance(plan.chunks)
        if rows is None:
            return LaunchedStep(torch.empty(0, dtype=torch.int64), NONE)
        if self._profiler:
            self._profiler.step()
        if self._idle_times:
            self._idle_times.begin(follows=rows.shape.num_decode > 0)
        tokens = self._graphs.replay(rows.record, rows.shape) if self._graphs else None
        if tokens is None:
            tokens = self._compute(self._to_device(rows.record), rows.shape)
        return self._on_its_way(tokens, rows.sampled)

    def _compute(self, record: Tensor, shape: Shape) -> Tensor:
        """One token for each row, int64 [num_rows]; that of a row that does not sample is void."""
        apply_plan(record, self._slots, self._buffers, shape, self.block_size)
        hidden_states = self._model(self._buffers.step(shape), self._kv_cache)
        if shape.num_tiles:
            hidden_states = hidden_states[self._buffers.last_tokens[: shape.num_rows]]
        return self._sample(hidden_states, shape.num_rows)

    def _sample(self, hidden_states: Tensor, num_rows: int) -> Tensor:
        """Rank 0 samples; every rank gets the tokens, and decodes them in the next step."""
        slots, batch, tp = self._buffers.slots[:num_rows], self._slots, self._model.tp
        logits = self._model.compute_logits(hidden_states)
        tokens = torch.empty_like(slots)
        if logits is not None:
            tokens = sample(
                logits,
                slots=slots,
                positions=self._buffers.next_positions[:num_rows],
                seeds=batch.seeds,
                temperature=batch.temperature,
                top_k=batch.top_k,
                top_p=batch.top_p,
                min_p=batch.min_p,
                last_token=batch.last_token[:-1],
            )
        if tp.size > 1:
            # the last element takes the tokens of the rows that do not sample: their slot is -1
            batch.last_token[slots] = tp.broadcast(tokens)
        return tokens

    def _to_device(self, record: Record) -> Tensor:
        tensor = torch.from_numpy(record)
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._is_cuda else tensor

    def _on_its_way(self, tokens: Tensor, sampled: Integers) -> LaunchedStep:
        if not self._is_cuda:
            return LaunchedStep(tokens, sampled)
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        assert self._idle_times  # noqa: S101  for mypy
        return LaunchedStep(host, sampled, self._idle_times.end())
