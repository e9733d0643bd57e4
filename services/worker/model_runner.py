"""One rank of the model: weights, KV cache and persistent batch, and the step that joins them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.attention.types import KVCache
from penstock.kernels.step.apply_plan import apply_plan
from penstock.kernels.step.forward_batch import BatchShape
from penstock.kernels.step.types import StepBuffers, make_slots, make_step_buffers
from penstock.models.qwen3 import Qwen3
from penstock.protocol.messages.plan import BatchPlan
from penstock.services.worker.cuda_graphs import Computed, CudaGraphs
from penstock.services.worker.grammars import Grammars
from penstock.services.worker.idle_times import IdleTimes
from penstock.services.worker.logits_processor import SecondPass
from penstock.services.worker.persistent_batch import NONE, Integers, PersistentBatch
from penstock.services.worker.sampler import Sampler
from penstock.services.worker.step_output import BAD_LOGITS, OnItsWay, Told
from penstock.services.worker.transfers import to_device, to_host


class LaunchedStep:
    """A step that was launched: its tokens are on their way to the host."""

    def __init__(
        self,
        tokens: Tensor,
        sampled: Integers,
        event: Any = None,
        way: OnItsWay | None = None,
    ) -> None:
        """tokens: int64, in host memory; there behind `event`, a torch.cuda.Event, if it is given.

        sampled: which of `tokens` were sampled, in ascending order of slot; way: what else there
        is behind `event`.
        """
        self._tokens = tokens
        self._sampled = sampled
        self._event = event
        self._way = way

    def done(self) -> bool:
        """Whether `token_ids` answers without waiting."""
        return self._event is None or bool(self._event.query())

    def token_ids(self) -> list[int]:
        """The sampled tokens; -1 for a row that `told` names as failed."""
        self._wait()
        ids: list[int] = self._tokens.numpy()[self._sampled].tolist()
        return ids

    def told(self) -> Told:
        """What the step tells beside them."""
        self._wait()
        told = self._way.told() if self._way else Told([], [], [])
        missing = np.flatnonzero(self._tokens.numpy()[self._sampled] < 0).tolist()
        known = {index for index, _ in told.failed}
        told.failed.extend((index, BAD_LOGITS) for index in missing if index not in known)
        return told

    def _wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class ModelRunner:
    """Runs plans, in order, on the device where the KV cache is."""

    def __init__(
        self,
        model: Qwen3,
        batch: PersistentBatch,
        kv_caches: Sequence[KVCache],
        num_slots: int,
        max_tokens: int,
        grammars: Grammars | None = None,
    ) -> None:
        """max_tokens: most tokens of a step; grammars: on rank 0, for rows that have one.

        Raises GroupError.
        """
        self.num_blocks = batch.num_blocks
        self.block_size = batch.block_size
        self._model = model
        self._batch = batch
        self._kv_caches = kv_caches
        self._device = device = kv_caches[0].k.device
        self._is_cuda = device.type == "cuda"
        self._slots = make_slots(num_slots, batch.max_blocks, device)
        self._buffers: StepBuffers = make_step_buffers(
            num_slots, batch.max_blocks, max(max_tokens, num_slots), device
        )
        self._sampler = Sampler(model, self._slots, num_slots, batch.vocab_size)
        self._second = SecondPass(model, self._slots, self._buffers, batch.vocab_size, grammars)
        self._graphs: CudaGraphs | None = None
        self._profiler: Any = None
        self._idle_times = IdleTimes() if self._is_cuda else None

    def idle_us(self) -> tuple[float, float]:
        """Median and 99th percentile of the GPU's wait between two steps; 0 on a CPU."""
        return self._idle_times.percentiles() if self._idle_times else (0.0, 0.0)

    def clear(self) -> None:
        """Forgets every sequence; the KV cache stays as it is."""
        self._batch.clear()
        self._second.clear()

    def use_graphs(self, shapes: Iterable[BatchShape]) -> None:
        """Replay steps that fit into one of `shapes`."""
        self._graphs = CudaGraphs(self._compute, shapes, self._device)

    @torch.inference_mode()
    def capture_graphs(self, on_progress: Callable[[], None]) -> None:
        """Capture all of them now, which each would be at its first use."""
        if self._graphs:
            self._graphs.capture_all(on_progress)

    def profile(self, profiler: Any) -> None:
        """Tells `profiler`, a torch.profiler.profile, of every step from here on."""
        self._profiler = profiler

    @torch.inference_mode()
    def launch(self, plan: BatchPlan) -> LaunchedStep:
        """Start a step. Raises ValueError for a plan that can't be, GroupError."""
        self._batch.apply(plan)
        self._second.apply(plan)
        rows = self._batch.advance(plan.chunks, plan.drafts)
        if rows is None:
            return LaunchedStep(torch.empty(0, dtype=torch.int64), NONE)
        if self._profiler:
            self._profiler.step()
        if self._idle_times:
            self._idle_times.begin(follows=rows.shape.num_decode > 0)
        computed = self._graphs.replay(rows.record, rows.shape) if self._graphs else None
        if computed is None:
            computed = self._compute(to_device(rows.record, self._device), rows.shape)
        if not self._second.rows:
            return self._on_its_way(computed.tokens, rows.sampled)
        way = self._second.run(rows, computed)
        self._sampler.share(computed.tokens, self._buffers.slots[: len(computed.tokens)])
        launched = self._on_its_way(computed.tokens, rows.sampled, way)
        self._second.follows(launched.token_ids)
        return launched

    def _compute(self, record: Tensor, shape: BatchShape) -> Computed:
        """A whole step."""
        apply_plan(record, self._slots, self._buffers, shape, self.block_size)
        hidden_states = self._model(self._buffers.forward_batch(shape), self._kv_caches)
        last = hidden_states
        if shape.num_tiles:
            last = hidden_states[self._buffers.last_tokens[: shape.num_rows]]
        return Computed(*self._sample(last), hidden_states)

    def _sample(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        num_rows = len(hidden_states)
        slots, positions = self._buffers.slots[:num_rows], self._buffers.next_positions[:num_rows]
        return self._sampler(hidden_states, slots, positions)

    def _on_its_way(
        self, tokens: Tensor, sampled: Integers, way: OnItsWay | None = None
    ) -> LaunchedStep:
        tokens = to_host(tokens)
        event = self._idle_times.end() if self._idle_times else None
        return LaunchedStep(tokens, sampled, event, way)
