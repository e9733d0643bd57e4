"""Execution of steps on one rank, with the weights, KV cache and persistent batch."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.layouts.forward_batch import (
    LARGE_TILE,
    SMALL_TILE,
    BatchShape,
    ForwardBatch,
)
from penstock.kernels.layouts.sampling import LogitsState
from penstock.kernels.layouts.states import States
from penstock.kernels.layouts.step import Slots, StepBuffers, make_slots, make_step_buffers
from penstock.kernels.sampling.logits import process_logits
from penstock.kernels.sampling.sampling import candidates, draw_candidate, sample
from penstock.kernels.step.apply_plan import apply_plan
from penstock.models.model import Model
from penstock.protocol.messages.plan import STATE_WINDOW, BatchPlan
from penstock.services.worker.cuda_graphs import Computed, CudaGraphs
from penstock.services.worker.drafter import Drafter
from penstock.services.worker.grammars import Grammars
from penstock.services.worker.launched_step import (
    NOTHING,
    Completed,
    LaunchedStep,
    to_device,
    to_host,
)
from penstock.services.worker.logits_processor import LogitsProcessor
from penstock.services.worker.memory.kv_cache import KVMemory
from penstock.services.worker.memory.kv_offload import KvOffload
from penstock.services.worker.persistent_batch import PersistentBatch, Rows
from penstock.services.worker.timings import IdleTimes


class Sampler:
    """The sampler of a token for each row. Each rank has the logits of its vocabulary shard.

    With several GPUs of a node, each rank finds the best tokens of its shard and reads the results
    of other ranks (`ShardedSampler`). With several nodes, the ranks exchange candidates, and all
    ranks draw from the candidates; rows for which candidates do not suffice go through the logits
    processor. With CPUs of a node, rank 0 draws and broadcasts the tokens.
    """

    def __init__(
        self, model: Model, slots: Slots, state: LogitsState, max_rows: int, vocab_size: int
    ) -> None:
        """Allocate symmetric memory for up to `max_rows` rows if needed. Raises GroupError.

        state: changes to this rank's logits.
        """
        self._model = model
        self._slots = slots
        self._state = state
        self._sharded = None
        if model.tp.shares_memory:
            from penstock.kernels.sampling.triton_sampling import ShardedSampler, buffer_size

            size = buffer_size(max_rows, vocab_size, model.tp.size)
            memory = model.tp.symmetric(size, torch.float32)
            self._sharded = ShardedSampler(*memory, model.tp.rank, max_rows, vocab_size)

    def __call__(
        self, hidden_states: Tensor, slots: Tensor, positions: Tensor, newest: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return tokens, int64 [num_rows], and this rank's logits. All ranks get all tokens.

        The tokens also become the last tokens of their slots.
        slots, positions, newest: as for `process_logits`.
        """
        tp, head = self._model.tp, self._model.head
        rows = slots, positions, self._slots.sampling()
        out = self._sharded.logits(len(slots)) if self._sharded else None
        logits = self._model.compute_logits(hidden_states, out)
        process_logits(logits, slots, positions, newest, self._state)
        if self._sharded:
            return self._sharded.sample(tp.barrier, *rows), logits
        if tp.spans_nodes:
            own = candidates(logits, head.stop - head.start, tp.rank, tp.size, *rows)
            return draw_candidate(tp.all_gather(own), logits.shape[1], *rows), logits
        joined = head.join(logits)
        tokens = slots.new_empty(len(slots)) if joined is None else sample(joined, *rows)
        self.share(tokens, slots)
        return tokens, logits

    def share(self, tokens: Tensor, slots: Tensor) -> None:
        """Broadcast rank 0's tokens, which become the last tokens of `slots`."""
        if self._model.tp.size > 1:
            # Rows that do not sample have slot -1: their tokens go to the last element. The token
            # -1 of a failed row is replaced, because it can't be an input.
            self._slots.last_token[slots] = self._model.tp.broadcast(tokens).clamp(min=0)


class ModelRunner:
    """The executor of plans, in order, on the device of the KV cache."""

    def __init__(
        self,
        model: Model,
        batch: PersistentBatch,
        kv: KVMemory,
        max_tokens: int,
        grammars: Grammars | None,
        memory_id: int,
        take_over: Callable[[], None],
        states: States | None = None,
        max_drafts: int = 0,
        blocks_per_state: int = 0,
    ) -> None:
        """Allocate the step's buffers.

        max_tokens: maximum number of tokens in a step. grammars: None on all ranks but rank 0.
        memory_id: as `WorkerState.memory_id`. take_over: as `PersistentMemory.take_over`.
        states: state blocks of a model with recurrent state. max_drafts: maximum number of drafts
        of a sequence in a step, by multi-token prediction. blocks_per_state: as
        `WorkerState.blocks_per_state`.
        """
        self.blocks_per_state = blocks_per_state
        self.states, self.num_state_blocks = states, batch.num_state_blocks
        self.num_blocks, self.block_size = batch.num_blocks, batch.block_size
        self.kv, self.memory_id, self.take_over = kv, memory_id, take_over
        self.offload: KvOffload | None = None  # the host tier
        self._model = model
        self._batch = batch
        self._kv_caches = kv_caches = kv.layers
        self._device = device = kv.values.device
        num_slots = batch.num_slots
        self._slots = make_slots(num_slots, batch.max_blocks, device)
        self._buffers: StepBuffers = make_step_buffers(
            num_slots, batch.max_blocks, max(max_tokens, num_slots), device
        )
        self.logits_processor = LogitsProcessor(model, self._slots, batch.vocab_size, grammars)
        state = self.logits_processor.state
        self._sampler = Sampler(model, self._slots, state, num_slots, batch.vocab_size)
        self._drafter = None
        # the window of a state block also has the token before the drafts
        self.max_drafts = min(max_drafts, STATE_WINDOW - 1) if model.mtp else 0
        if model.mtp:
            places = self._slots, self._buffers, kv_caches, self.block_size
            self._drafter = Drafter(model, *places, self.max_drafts)
        self._last_step: LaunchedStep | None = None
        self._graphs: CudaGraphs | None = None
        self.profiler: Any = None
        self._idle_times = IdleTimes() if device.type == "cuda" else None
        compiled, tensors = model.compiled, (self._slots, self._buffers, kv_caches, states)
        self._decode = compiled and compiled.decode_step(*tensors)

    def idle_us(self) -> tuple[float, float]:
        """Return the GPU's idle time between steps, median and 99th percentile; 0 on a CPU."""
        return self._idle_times.percentiles() if self._idle_times else (0.0, 0.0)

    @property
    def step_sizes(self) -> list[int]:
        """Numbers of tokens to which steps with prefill are padded; empty without graphs."""
        return self._graphs.prefill_sizes if self._graphs else []

    @property
    def tile_sizes(self) -> list[int]:
        """Numbers of tokens to which attention pads chunks of prompts; empty on CPUs."""
        return [SMALL_TILE, LARGE_TILE] if self._device.type == "cuda" else []

    @property
    def progress(self) -> int:
        """A number that changes while a step is computed, for any thread to read."""
        return self._model.progress

    def clear(self) -> None:
        """Remove all sequences. The KV cache keeps its contents."""
        self._complete_last()
        if self.offload:
            self.offload.clear()
        self._batch.clear()
        self.logits_processor.clear()

    def use_graphs(self, shapes: Iterable[BatchShape]) -> None:
        """Use CUDA graphs for steps that fit into any of `shapes`."""
        sizes = self._batch.max_blocks, self.offload is not None
        self._graphs = CudaGraphs(self._compute, shapes, self._device, *sizes)

    @torch.inference_mode()
    def capture_graphs(self) -> Iterator[None]:
        """Capture all graphs now, not at their first use. Yield after each graph."""
        if self._graphs:
            yield from self._graphs.capture_all()

    def launch(self, plan: BatchPlan) -> LaunchedStep:
        """Launch the rest of the last step, then a new step.

        Raises ValueError for an invalid plan, GroupError.
        """
        self._complete_last()
        begin = monotonic()
        step = self._start(plan)
        step.seconds = monotonic() - begin
        return step

    def _start(self, plan: BatchPlan) -> LaunchedStep:
        if self.offload:
            self.offload.before_step()
        if not 0 <= plan.num_drafts <= self.max_drafts:
            found = f"got {plan.num_drafts}, expected 0 to {self.max_drafts}"
            raise ValueError(f"number of drafts: {found}")
        self._batch.apply(plan)
        may_process = any(row.extras for row in plan.added) or self._model.tp.spans_nodes
        if may_process or self.logits_processor.rows:
            with torch.inference_mode():
                processed = self.logits_processor.apply(plan)
            for slot, row in processed.items():
                self._batch.set_numbers(slot, row.numbers())
        rows = self._batch.advance(plan.chunks, plan.drafts)
        if plan.drafts and self.logits_processor.rows:
            self.logits_processor.count_drafts(plan.drafts)
        if rows is None:
            return LaunchedStep.finished([])
        if self.profiler:
            self.profiler.step()
        if self._decode and not rows.shape.num_tiles and not self.logits_processor.rows:
            tokens = self._decode(rows.record, rows.shape.num_rows)
            if len(rows.sampled) < len(tokens):  # without chunks of one token that end no prompt
                tokens = [tokens[index] for index in rows.sampled.tolist()]
            return LaunchedStep.finished(tokens)
        return self._launch(rows, plan.num_drafts)

    @torch.inference_mode()
    def _launch(self, rows: Rows, num_drafts: int) -> LaunchedStep:
        if self._idle_times:
            self._idle_times.begin(follows=rows.follows_last_step)
        computed = self._graphs.replay(rows.record, rows.shape) if self._graphs else None
        if computed is None:
            computed = self._compute(to_device(rows.record, self._device), rows.shape)
        is_processed = bool(self.logits_processor.rows) and self.logits_processor.handles(rows)
        make_drafts = None
        if self._drafter and computed.drafts:
            followers = to_device(self._batch.followers(rows), self._device)
            drafted = computed.drafts, followers, len(computed.tokens), num_drafts
            make_drafts = partial(self._drafter.run, *drafted)
        complete = partial(self._complete, rows, computed, is_processed, make_drafts)
        step = self._last_step = LaunchedStep(rows.sampled, complete)
        if not is_processed or self._device.type == "cpu":  # where no other step overlaps
            step.complete()
        return step

    def _complete_last(self) -> None:
        if self._last_step:
            self._last_step.complete()
            if self.logits_processor.rows:
                self.logits_processor.follow(self._last_step.token_ids)
            self._last_step = None

    @torch.inference_mode()
    def _complete(
        self,
        rows: Rows,
        computed: Computed,
        is_processed: bool,
        make_drafts: Callable[[], Tensor | None] | None,
    ) -> Completed:
        """Launch the rest of a step."""
        pending = NOTHING
        if is_processed:
            pending = self.logits_processor.run(rows, computed)
            self._sampler.share(computed.tokens, self._buffers.slots[: len(computed.tokens)])
        drafts = make_drafts() if make_drafts else None
        tokens, drafts = to_host(computed.tokens), None if drafts is None else to_host(drafts)
        events = self._idle_times.end() if self._idle_times else None
        return Completed(tokens, events, pending, drafts)

    def _forward(self, batch: ForwardBatch) -> Tensor:
        if self.states is None:
            return self._model(batch, self._kv_caches)  # type: ignore[no-any-return]
        num_rows, bounds = batch.shape.num_rows, (batch.cu_seqlens_q, batch.context_lens)
        packed, prompt_ends = self._buffers.states[:num_rows], self._buffers.prompt_ends[:num_rows]
        step = self.states.begin(packed, *bounds, prompt_ends)
        hidden_states = self._model(batch._replace(states=step), self._kv_caches)
        self.states.end(step, self._buffers.decode_lens[:num_rows])
        return hidden_states  # type: ignore[no-any-return]

    def _compute(self, record: Tensor, shape: BatchShape) -> Computed:
        apply_plan(record, self._slots, self._buffers, shape, self.block_size)
        hidden_states = self._forward(self._buffers.forward_batch(shape))
        last, newest = hidden_states, self._buffers.input_ids[: shape.num_tokens]
        if shape.num_tiles:
            last_tokens = self._buffers.last_tokens[: shape.num_rows]
            last, newest = hidden_states[last_tokens], newest[last_tokens]
        next_positions = self._buffers.next_positions[: len(last)]
        rows = self._buffers.slots[: len(last)], next_positions, newest
        if not self._model.has_head:
            return Computed(torch.zeros_like(next_positions), hidden_states, hidden_states, rows)
        tokens, logits = self._sampler(last, *rows)
        sample_deferred = None
        if self._model.tp.size == 1:
            sample_deferred = partial(self.logits_processor.sample, logits, tokens, *rows)
        drafter = self._drafter
        drafts = drafter.passes(tokens, hidden_states, shape) if drafter else None
        return Computed(tokens, logits, hidden_states, rows, sample_deferred, drafts)
