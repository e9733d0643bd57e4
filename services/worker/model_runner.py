"""One rank of the model: weights, KV cache and persistent batch, and the step that joins them."""

from collections.abc import Callable
from os import cpu_count
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.sampling import sample
from penstock.models.parallel import TensorParallel
from penstock.models.qwen3 import Qwen3
from penstock.models.weights import load_weights
from penstock.protocol.checkpoint import check_tp, read_model_config
from penstock.protocol.config import Config
from penstock.protocol.messages import WorkerAssignment
from penstock.protocol.plan import BatchPlan
from penstock.services.worker.kv_cache import allocate_kv_cache
from penstock.services.worker.persistent_batch import PersistentBatch, Sampled


class LaunchedStep(NamedTuple):
    """A step that was launched; on the CPU it is done when `launch` returns."""

    tokens: Tensor
    """int64 [num_sampled], in ascending order of slot"""

    def done(self) -> bool:
        """Whether `token_ids` answers without waiting."""
        return True

    def token_ids(self) -> list[int]:
        """The sampled tokens."""
        ids: list[int] = self.tokens.tolist()
        return ids


class ModelRunner:
    """Runs plans, in order."""

    def __init__(self, model: Qwen3, tp: TensorParallel, batch: PersistentBatch, kv_cache: Tensor):
        self.num_blocks = batch.num_blocks
        self._model = model
        self._tp = tp
        self._batch = batch
        self._kv_cache = kv_cache

    def clear(self) -> None:
        """Forgets every sequence; the KV cache stays as it is."""
        self._batch.clear()

    @torch.inference_mode()
    def launch(self, plan: BatchPlan) -> LaunchedStep:
        """Computes a step. Raises ValueError for a plan that can't be, GroupError."""
        self._batch.apply(plan)
        rows = self._batch.advance(plan.chunks)
        if rows is None:
            return LaunchedStep(torch.empty(0, dtype=torch.int64))
        step, sampled = rows
        hidden_states = self._model(step, self._kv_cache)
        return LaunchedStep(self._sample(hidden_states, sampled))

    def _sample(self, hidden_states: Tensor, sampled: Sampled) -> Tensor:
        """Rank 0 samples; every rank gets the tokens, and decodes them in the next step."""
        slots = sampled.slots
        if not slots.numel():
            return slots
        batch = self._batch
        logits = self._model.compute_logits(hidden_states[sampled.last_tokens])
        tokens = torch.empty_like(slots)
        if logits is not None:
            tokens = sample(
                logits,
                positions=sampled.positions,
                seeds=batch.seeds[slots],
                temperature=batch.temperature[slots],
                top_k=batch.top_k[slots],
                top_p=batch.top_p[slots],
                min_p=batch.min_p[slots],
            )
        batch.last_token[slots] = self._tp.broadcast(tokens)
        return tokens


def load(
    config: Config, assignment: WorkerAssignment, on_progress: Callable[[], None]
) -> ModelRunner:
    """Joins the group, loads this rank's weights, allocates its KV cache.

    Calls `on_progress` now and then. Raises ModelError, GroupError.
    """
    # One core is for the other processes: threads that wait for one that has no core are dear.
    torch.set_num_threads(config.num_threads or max(1, ((cpu_count() or 1) - 1) // config.tp))
    model_config = read_model_config(config.model_folder)
    check_tp(model_config, assignment.tp_size)
    tp = TensorParallel.join(assignment.rendezvous, assignment.rank, assignment.tp_size)
    max_model_len = config.max_model_len or model_config.max_position_embeddings
    max_blocks = -(-max_model_len // config.block_size)
    model = Qwen3(model_config, tp, num_positions=max_blocks * config.block_size)
    load_weights(model, config.model_folder, on_progress)
    kv_cache = allocate_kv_cache(config, model_config, tp.size)
    batch = PersistentBatch(
        num_slots=config.max_num_seqs,
        max_blocks=max_blocks,
        block_size=config.block_size,
        num_blocks=kv_cache.shape[2],
        vocab_size=model_config.vocab_size,
    )
    return ModelRunner(model, tp, batch, kv_cache)
