"""The compiled layers of a model on a CPU: their weights, and the exchange of ranks' results."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from penstock.kernels.back_ends import CHOSEN
from penstock.kernels.cpu.compiled_layers import CompiledLayers, unsupported
from penstock.kernels.cpu.compiled_step import DecodeStep, compiled_step
from penstock.kernels.cpu.compiler import host
from penstock.kernels.cpu.shared_memory import SharedMemory
from penstock.kernels.cpu.types import MATRICES, DeltaShape, LayerShape, LayerWeights, Matrix
from penstock.kernels.layouts.forward_batch import ForwardBatch
from penstock.kernels.layouts.kv_cache import KVCache
from penstock.kernels.layouts.states import States
from penstock.kernels.layouts.step import Slots, StepBuffers
from penstock.kernels.packed.matrices import Integers, quantize, without_needless_shift
from penstock.models.architecture import QWEN3, QWEN3_5, Ranks, describe, family_of
from penstock.models.layers import MoE, SharedExpert
from penstock.models.model import Model
from penstock.models.parallel import RMSNorm, dequantize
from penstock.protocol.checkpoint import ModelConfig

FAMILIES = QWEN3.module, QWEN3_5.module


class CompiledDecoder:
    """Replacement of a model's layers and output layer; experts stay in torch."""

    def __init__(
        self, model: Model, config: ModelConfig, bits: int = 16, quantize_lm_head: bool = False
    ) -> None:
        """Compile a loaded model; its matrices become 16 bits if that changes no number.

        bits: with 8 or 4, the layers' matrices are converted to integers and freed.
        quantize_lm_head: convert the output layer to 8-bit integers. Raises ValueError for a model
        that can't be compiled, and OSError.
        """
        if config.fp8 or (config.weight_format and bits != 16):
            raise ValueError(f"weights in {config.format_name}")
        if type(model.model).__module__ not in FAMILIES:
            raise ValueError("layers of another family than Qwen3 and Qwen3.5")
        for module in model.modules():
            if isinstance(module, SharedExpert) or module is model.mtp:
                dequantize(module)  # these stay in torch
        self._makes_drafts = model.mtp is not None
        self._tp, self._rope, self._norm = model.tp, model.rope, model.model.norm
        self._embed = model.model.embed_tokens
        self._layers: list[Any] = [*model.model.layers]
        shape = _layer_shape(config, model.tp.size)
        weight = model.head.weight
        narrowed = narrow(model)
        head: Matrix | None = weight if isinstance(weight, Tensor) else None  # e4m3 stays in torch
        if quantize_lm_head and isinstance(head, Tensor):
            head = quantize(head, 8)
        self._head = head
        try:
            weights = [_quantized(_weights(layer), bits) for layer in self._layers]
            self._compiled = CompiledLayers(
                weights, shape, model.attention.block_size, head=head, embedding=self._embed.weight
            )
        except Exception:
            for matrix in narrowed:  # torch needs a single type
                matrix.data = matrix.data.float()
            raise
        self._shared: SharedMemory | None = None  # memory of this step's ranks
        self._has_experts = any(isinstance(layer.mlp, MoE) for layer in self._layers)

    def forward(self, batch: ForwardBatch, rope: Tensor, kv_caches: Sequence[KVCache]) -> Tensor:
        """Compute `Model.forward`."""
        residual = self._embedded(batch.input_ids)
        self._compiled.begin(batch, rope, kv_caches)
        self._shared = cast(SharedMemory | None, self._tp.shared)
        if self._shared and residual.nbytes > self._shared.part_bytes:
            self._shared = None
        if not self._has_experts and (self._shared or self._tp.size == 1):
            self._compiled.run(range(2 * len(self._layers)), residual, ranks=self._shared)
            return residual
        for index, layer in enumerate(self._layers):
            residual = self._half(2 * index, residual)
            if isinstance(layer.mlp, MoE):
                residual = layer.mlp(residual, layer.post_attention_layernorm)
            else:
                residual = self._half(2 * index + 1, residual)
        return residual

    def decode_step(
        self, slots: Slots, buffers: StepBuffers, caches: Sequence[KVCache], states: States | None
    ) -> DecodeStep | None:
        """Return the function for decode-only steps, or None if a part runs in torch."""
        if self._tp.size > 1 or self._has_experts or self._makes_drafts or self._head is None:
            return None
        if CHOSEN.compiled_step is None:  # it could not be compiled
            return None
        return DecodeStep(
            self._compiled,
            compiled_step(),
            num_layers=len(self._layers),
            embedding=self._embed.weight,
            norm=self._norm.weight,
            eps=self._norm.eps,
            head=self._head,
            rope=self._rope,
            kv_caches=caches,
            states=states,
            slots=slots,
            buffers=buffers,
        )

    @property
    def num_halves(self) -> int:
        return self._compiled.num_halves

    def _embedded(self, token_ids: Tensor) -> Tensor:
        if self._tp.size == 1:
            return self._compiled.embed(token_ids, self._embed.weight)
        embedded: Tensor = self._embed(token_ids)
        return embedded.float()

    def _half(self, half: int, residual: Tensor) -> Tensor:
        """Return the residual stream after half a layer, with the results of all ranks."""
        halves = range(half, half + 1)
        if self._shared or self._tp.size == 1:
            self._compiled.run(halves, residual, ranks=self._shared)
            return residual
        part = torch.zeros_like(residual)
        self._compiled.run(halves, residual, part)
        return self._tp.all_reduce(part, residual)

    def logits(
        self, hidden_states: Tensor, norm: RMSNorm, weight: Tensor, out: Tensor | None
    ) -> Tensor:
        """Compute `VocabParallelEmbedding.logits`."""
        matrix = weight if self._head is None else self._head
        return self._compiled.logits(hidden_states, norm.weight, norm.eps, matrix, out)


def can_compile(config: ModelConfig, tp_size: int) -> bool:
    """Return True if the form and the sizes of a rank's layers can be compiled."""
    is_known = family_of(config).module in FAMILIES
    return is_known and not unsupported(_layer_shape(config, tp_size))


def _layer_shape(config: ModelConfig, tp_size: int) -> LayerShape:
    architecture, ranks = describe(config), Ranks(tp_size)
    heads, kv_heads = architecture.heads
    delta = None
    if layers := architecture.state_layers:
        states = [state.shape_of_rank(ranks) for state in layers[0].state]
        key_heads = layers[0].state[1].axes[0].units_of_rank(ranks)
        value_heads, *dims = states[0]
        kernel, window = states[1][0] + 1, states[2][0]
        delta = DeltaShape(key_heads, value_heads, dims[0], dims[1], kernel, window)
    return LayerShape(
        config.hidden_size,
        heads.units_of_rank(ranks),
        kv_heads.units_of_rank(ranks),
        kv_heads.unit_size,
        config.intermediate_size // tp_size,
        config.rms_norm_eps,
        config.rotary_dim,
        config.is_hybrid,
        delta,
    )


def _weights(layer: Any) -> LayerWeights:
    mlp = layer.mlp
    is_sparse = isinstance(mlp, MoE)
    if delta := getattr(layer, "linear_attn", None):
        mixer = {
            "qkv": delta.qkvz_proj.weight,
            "q_norm": delta.norm.weight,
            "k_norm": None,
            "o": delta.out_proj.weight,
            "ba": delta.ba_proj.weight,
            "conv": delta.conv.weight.squeeze(1).t().contiguous(),
            "a_log": delta.a_log.weight,
            "dt_bias": delta.dt_bias.weight,
        }
    else:
        attention = layer.self_attn
        mixer = {
            "qkv": attention.qkv_proj.weight,
            "q_norm": attention.q_norm.weight,
            "k_norm": attention.k_norm.weight,
            "o": attention.o_proj.weight,
        }
    return LayerWeights(
        **mixer,
        input_norm=layer.input_layernorm.weight,
        post_norm=layer.post_attention_layernorm.weight,
        gate_up=None if is_sparse else mlp.gate_up_proj.weight,
        down=None if is_sparse else mlp.down_proj.weight,
    )


def _quantized(layer: LayerWeights, bits: int) -> LayerWeights:
    """Return the layer with integers of fewer than 16 bits, and free its matrices."""
    if bits == 16:
        return layer
    changed: dict[str, Any] = {}
    for name in MATRICES:
        matrix = getattr(layer, name)
        if isinstance(matrix, nn.Parameter):
            changed[name] = quantize(matrix, bits)
            matrix.data = matrix.data.new_empty(0)
    return layer._replace(**changed)


def narrow(model: Model) -> list[nn.Parameter]:
    """Replace float32 by 16 bits, and drop shifts of integers, if that changes no number.

    Returns the float matrices. In layers that can't be compiled, nothing is replaced.
    """
    if type(model.model).__module__ not in FAMILIES:
        return []
    weights: list[Any] = [weight for layer in model.model.layers for weight in _weights(layer)]
    weights += [model.model.embed_tokens.weight, model.head.weight]
    parameters = (weight for weight in weights if isinstance(weight, nn.Parameter))
    matrices = [parameter for parameter in parameters if parameter.ndim == 2]
    for matrix in matrices:
        if matrix.dtype == torch.float32:
            matrix.data = _narrowed(matrix.data)
    for module in model.modules():
        if isinstance(weight := getattr(module, "weight", None), Integers):
            weight.scale.data = without_needless_shift(weight).data
    return matrices


def _narrowed(weight: Tensor) -> Tensor:
    """Return float32 as bfloat16 or float16 if either represents all numbers exactly."""
    if not weight.view(torch.int16)[..., ::2].any():  # the low halves, little-endian
        return weight.bfloat16()
    half = weight.half()
    return half if host().widens_half and torch.equal(half.float(), weight) else weight
