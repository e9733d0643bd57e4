"""A model of any family: its decoder, the output layer, and their compiled replacements."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from penstock.kernels.layouts.forward_batch import ForwardBatch
from penstock.kernels.layouts.kv_cache import KVCache
from penstock.kernels.layouts.states import States
from penstock.kernels.layouts.step import Slots, StepBuffers
from penstock.models.architecture import family_of
from penstock.models.layers import Setup, rope_table
from penstock.models.parallel import RMSNorm, VocabParallelEmbedding

# (record, number of rows) → tokens of the rows, -1 for a failed row, without logits processing
HostStep = Callable[[NDArray[np.int32], int], list[int]]


class Compiled(Protocol):
    """Faster replacement of the layers, and of the output layer unless it is `Quantized`."""

    @property
    def num_halves(self) -> int:
        """A number that changes when half of a layer was computed, for any thread to read."""

    def forward(self, batch: ForwardBatch, rope: Tensor, kv_caches: Sequence[KVCache]) -> Tensor:
        """Compute the decoder's `forward`."""

    def logits(
        self, hidden_states: Tensor, norm: RMSNorm, weight: Tensor, out: Tensor | None
    ) -> Tensor:
        """Compute `VocabParallelEmbedding.logits`."""

    def decode_step(
        self, slots: Slots, buffers: StepBuffers, caches: Sequence[KVCache], states: States | None
    ) -> HostStep | None:
        """Return the function for decode-only steps, or None if it does not exist."""


class Model(nn.Module):
    """Model, or the part of one rank."""

    def __init__(self, setup: Setup, num_positions: int, quantize_lm_head: bool = False) -> None:
        """Build the layers.

        num_positions: maximum tokens of a sequence. quantize_lm_head: use an output layer in 8
        bits, a copy of the embedding if the checkpoint ties the two.
        """
        super().__init__()
        config, self.tp, self.attention, _ = setup
        self.compiled: Compiled | None = None
        self._num_layers = 0  # that were computed in torch
        # False: the model returns hidden states, and no logits are computed
        self.has_head = not config.is_embedding_model
        family = family_of(config)
        description = family.describe(config)
        module = import_module(family.module)
        self.model: Any = module.Decoder(description, setup)
        # multi-token prediction, which makes drafts; None: not used
        self.mtp: Any = None
        if description.mtp:
            self.mtp = module.MultiTokenPrediction(description.mtp, setup)
        heads = description.of_kind("head")
        if heads or (quantize_lm_head and self.has_head):
            (source,) = heads or description.of_kind("embedding")
            self.lm_head = VocabParallelEmbedding(self.tp, source.weights[0], quantize_lm_head)
        rope = config.rope
        self.rope = rope_table(config.rotary_dim, num_positions, rope.base, rope.yarn)

    def forward(self, batch: ForwardBatch, kv_caches: Sequence[KVCache]) -> Tensor:
        """Return the input of `compute_logits` for each token: [num_tokens, hidden_size].

        kv_caches: caches of the layers that keep keys and values, with this rank's KV heads.
        """
        if self.compiled:
            return self.compiled.forward(batch, self.rope, kv_caches)
        self.attention.begin(batch)
        return self.model(batch, self.rope, kv_caches)  # type: ignore[no-any-return]

    def count_layers(self) -> None:
        """Let `progress` include layers in torch. On a GPU this would only cost time."""

        def count(*_: object) -> None:
            self._num_layers += 1

        for layer in self.model.layers:
            layer.register_forward_hook(count)

    @property
    def progress(self) -> int:
        """A number that changes while a step is computed, for any thread to read."""
        return self._num_layers + (self.compiled.num_halves if self.compiled else 0)

    def predict(
        self,
        residual: Tensor,
        norm: RMSNorm,
        next_ids: Tensor,
        batch: ForwardBatch,
        kv_caches: Sequence[KVCache],
        only_keys: bool = False,
    ) -> Tensor:
        """Return the residual stream of multi-token prediction for each token of a batch.

        For `mtp.norm` it is the input of `head.logits`: the logits of the token after the next. It
        is also the next `residual`, if the next token is a draft. `begin` of the attention must
        have been called for the batch. residual, norm: the residual stream after the model's last
        layer, and the norm after it. next_ids: each token's next token. only_keys: store keys and
        values only; the result is undefined.
        """
        embedded = self.model.embed_tokens(next_ids).to(residual.dtype)
        inputs = residual, norm, embedded, batch, self.rope, kv_caches[-1]
        return self.mtp(*inputs, only_keys)  # type: ignore[no-any-return]

    @property
    def head(self) -> VocabParallelEmbedding:
        head: VocabParallelEmbedding = getattr(self, "lm_head", self.model.embed_tokens)
        return head

    def compute_logits(
        self, hidden_states: Tensor, out: Tensor | None = None, norm: RMSNorm | None = None
    ) -> Tensor:
        """Return this rank's share of the logits: see `VocabParallelEmbedding.logits`.

        norm: by default the model's last.
        """
        weight, norm = self.head.weight, norm or self.model.norm
        if self.compiled and isinstance(weight, Tensor):
            return self.compiled.logits(hidden_states, norm, weight, out)
        return self.head.logits(hidden_states, norm, out)
