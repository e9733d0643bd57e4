"""Description of a model, made once: its layers, their weights, and their state.

All code that depends on shapes reads this description: the check of a checkpoint, loading and
cutting by rank, the estimate of memory, the KV cache, random checkpoints and compiled layers.
`launch` reads it as well, so this module does not import torch.

A family is a function that describes its models, an entry in `FAMILIES`, and a module with the
forward pass.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from math import ceil, lcm, prod
from typing import Literal, NamedTuple

from penstock.protocol.checkpoint import FULL_ATTENTION, ModelConfig, ModelError
from penstock.protocol.messages.plan import STATE_WINDOW

STATE_ALIGNMENT = 512  # bytes
RUN = 4096  # token ids of a run; on GPUs the vocabulary is cut between runs, as the sampler needs


class Ranks(NamedTuple):
    """Tensor-parallel group, its way to divide a model, and one of its ranks."""

    size: int = 1
    rank: int = 0
    on_gpus: bool = False
    expert_parallel: bool = False  # True: a rank has whole experts instead of a part of each expert


class Part(NamedTuple):
    """A rank's part of a dimension."""

    start: int
    stop: int
    length: int  # includes padding after `stop`


class Axis(NamedTuple):
    """Dimension divided among ranks in units that stay whole, such as heads."""

    field: str  # field of config.json with the number of units
    units: int
    unit_size: int = 1
    # even: all ranks have the same number of units; shared: if there are fewer units than ranks,
    # adjacent ranks have the same unit; padded: the last ranks may have fewer units, followed by
    # zeros
    division: Literal["even", "shared", "padded"] = "even"

    @property
    def size(self) -> int:
        return self.units * self.unit_size

    def units_of_rank(self, ranks: Ranks) -> int:
        """Return the number of units of each rank, including padding."""
        if self.division == "padded":
            run = RUN if ranks.on_gpus and ranks.size > 1 else 1
            return -(-self.units // (run * ranks.size)) * run
        return self.units // self._num_parts(ranks)

    def part(self, ranks: Ranks) -> Part:
        """Return the rank's part."""
        length = self.units_of_rank(ranks) * self.unit_size
        start = min(ranks.rank * self._num_parts(ranks) // ranks.size * length, self.size)
        return Part(start, min(start + length, self.size), length)

    def can_be_divided(self, num_ranks: int) -> bool:
        is_shared = self.division == "shared" and num_ranks % self.units == 0
        return self.division == "padded" or is_shared or self.units % num_ranks == 0

    def _num_parts(self, ranks: Ranks) -> int:
        """Return the number of different parts."""
        return min(ranks.size, self.units) if self.division == "shared" else ranks.size


class Weight(NamedTuple):
    """Tensor of the checkpoint; a layer of experts has one tensor for each expert."""

    name: str  # name in the checkpoint, with {} in place of an expert's number
    shape: tuple[int, ...]  # shape of the whole tensor, or of an expert's tensor
    fields: str  # fields of config.json that determine the shape
    # adjacent axes of dimension `dim`, each divided among the ranks; empty: every rank has the
    # whole tensor
    axes: tuple[Axis, ...] = ()
    dim: int = 0
    # True: in the checkpoint the first unit of each axis is followed by the second one of each,
    # and so on; all axes have the same number of units
    is_interleaved: bool = False
    is_matrix: bool = False  # True if the tensor has the checkpoint's weight format
    experts: Axis | None = None
    is_float32: bool = False  # True if the numbers stay float32 in a model of 16 bits
    added: float = 0.0  # added to the checkpoint's numbers

    @property
    def module(self) -> str:
        """Return the last part of the module's name, or of the tensor's: `q_proj`, `A_log`."""
        return self.name.removesuffix(".weight").rpartition(".")[2]

    @property
    def num_tensors(self) -> int:
        return self.experts.units if self.experts else 1

    def names(self) -> Iterator[str]:
        """Yield the name of each tensor."""
        return (self.name.format(number) for number in range(self.num_tensors))

    def experts_of_rank(self, ranks: Ranks) -> range:
        """Return the numbers of the experts of which the rank has a part or the whole."""
        if self.experts and ranks.expert_parallel:
            return range(*self.experts.part(ranks)[:2])
        return range(self.num_tensors)

    def divided(self, expert_parallel: bool) -> tuple[Axis, ...]:
        """Return the axes that ranks divide."""
        return (self.experts,) if self.experts and expert_parallel else self.axes

    def parts(self, ranks: Ranks) -> list[Part]:
        """Return the rank's parts of dimension `dim`; a single whole part if it is not divided."""
        if self.axes and not (self.experts and ranks.expert_parallel):
            begins = accumulate((axis.size for axis in self.axes), initial=0)
            parts = zip(begins, (axis.part(ranks) for axis in self.axes), strict=False)
            return [Part(begin + start, begin + stop, size) for begin, (start, stop, size) in parts]
        size = self.shape[self.dim]
        return [Part(0, size, size)]

    def shape_of_rank(self, ranks: Ranks) -> tuple[int, ...]:
        """Return the shape of the rank's part, preceded by the number of experts."""
        sizes = list(self.shape)
        sizes[self.dim] = sum(part.length for part in self.parts(ranks))
        return (*([len(self.experts_of_rank(ranks))] if self.experts else ()), *sizes)


class State(NamedTuple):
    """Tensor of float32 that a layer keeps for each sequence and replaces at each step.

    A layer's state includes its window: what the tokens of the last step would add, for up to
    `STATE_WINDOW` of `penstock.protocol.messages.plan` (see `penstock.kernels.layouts.states`).
    """

    axes: tuple[Axis, ...]  # adjacent axes of dimension `dim`, each divided among the ranks
    shape: tuple[int, ...]  # shape of the other dimensions
    dim: int = 0

    def shape_of_rank(self, ranks: Ranks) -> tuple[int, ...]:
        length = sum(axis.part(ranks).length for axis in self.axes)
        return *self.shape[: self.dim], length, *self.shape[self.dim :]


class Heads(NamedTuple):
    """Heads of attention with `unit_size` features each."""

    queries: Axis
    keys: Axis  # heads of keys and values, which are kept for each token


class Layer(NamedTuple):
    """Layer of the residual stream, including the norm before it."""

    # embedding, attention, delta, mlp, experts, norm or head; a family may have other kinds
    kind: str
    weights: tuple[Weight, ...]
    heads: Heads | None = None
    state: tuple[State, ...] = ()

    def has(self, module: str) -> bool:
        return any(weight.module == module for weight in self.weights)

    def pick(self, *modules: str) -> list[Weight]:
        """Return the weights of modules, given the last part of their names."""
        by_module = {weight.module: weight for weight in self.weights}
        return [by_module[module] for module in modules]


class Packing(NamedTuple):
    """The smallest number of KV blocks that have room for a sequence's state, and its places.

    The keys, or the values, of a layer with attention are a *plane* of the KV cache, which has a
    part of each KV block. The parts of the blocks that a state replaces are one piece of memory in
    each plane.
    """

    num_blocks: int
    places: list[tuple[int, int]]  # of each tensor: number of the plane, first byte in the piece


class Architecture(NamedTuple):
    """Layers of a model in the order of computation."""

    layers: tuple[Layer, ...]
    mtp: tuple[Layer, ...] = ()  # layers of multi-token prediction, which make drafts

    def of_kind(self, *kinds: str) -> list[Layer]:
        return [layer for layer in self.layers if layer.kind in kinds]

    @property
    def kv_layers(self) -> list[Layer]:
        """Return the layers that keep keys and values, which all have the same heads."""
        return [layer for layer in self.layers + self.mtp if layer.heads]

    @property
    def heads(self) -> Heads:
        """Return the heads of the attention layers."""
        return next(layer.heads for layer in self.layers if layer.heads)

    @property
    def weights(self) -> Iterator[Weight]:
        return (weight for layer in self.layers + self.mtp for weight in layer.weights)

    def tensors(self) -> Iterator[tuple[str, list[int], str]]:
        """Yield the name, the shape and the determining fields of each tensor of the checkpoint."""
        for weight in self.weights:
            for name in weight.names():
                yield name, list(weight.shape), weight.fields

    def token_bytes(self, ranks: Ranks, number_bytes: int, scale_bytes: int = 0) -> int:
        """Return the bytes of a rank's keys and values per token.

        scale_bytes: additional bytes for each key and value of a head.
        """
        _, kv_heads = self.heads
        head_bytes = kv_heads.unit_size * number_bytes + scale_bytes
        return 2 * len(self.kv_layers) * kv_heads.units_of_rank(ranks) * head_bytes

    @property
    def state_layers(self) -> list[Layer]:
        """Return the layers with recurrent state."""
        return [layer for layer in self.layers if layer.state]

    def pack_states(self, ranks: Ranks, block_bytes: int) -> Packing:
        """Return how a rank's state of a sequence lies in the place of KV blocks.

        block_bytes: size of a KV block in a plane, that is of its keys or values in a layer.
        """
        states = (state for layer in self.layers for state in layer.state)
        sizes = [4 * prod(state.shape_of_rank(ranks)) for state in states]
        sizes = [-(-size // STATE_ALIGNMENT) * STATE_ALIGNMENT for size in sizes]
        num_planes = 2 * len(self.kv_layers)
        step = lcm(STATE_ALIGNMENT, block_bytes)
        room = ceil(max(max(sizes), sum(sizes) / num_planes) / step) * step
        while (places := _first_fit(sizes, num_planes, room)) is None:
            room += step
        return Packing(room // block_bytes, places)

    def check_ranks(self, num_ranks: int, expert_parallel: bool = False) -> None:
        """Raise ModelError if the model can't be divided among the ranks of a group."""
        if expert_parallel and not any(weight.experts for weight in self.weights):
            raise ModelError("enable_expert_parallel: got true, but the model has no experts")
        axes = (axis for weight in self.weights for axis in weight.divided(expert_parallel))
        for axis in axes:
            if not axis.can_be_divided(num_ranks):
                raise ModelError(
                    f"tp: got {num_ranks}, expected a divisor of the model's {axis.field}, "
                    f"{axis.units}"
                )


def _first_fit(sizes: list[int], num_planes: int, room: int) -> list[tuple[int, int]] | None:
    """Return the places of tensors in planes that have `room` bytes each; None: not all fit."""
    begins, places = [0] * num_planes, {}
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        plane = next((n for n in range(num_planes) if begins[n] + sizes[index] <= room), None)
        if plane is None:
            return None
        places[index] = plane, begins[plane]
        begins[plane] += sizes[index]
    return [places[index] for index in range(len(sizes))]


def vector(module: str, size: int, fields: str) -> Weight:
    """Describe a one-dimensional weight, such as that of a norm."""
    return Weight(f"{module}.weight", (size,), fields)


def zero_centered(module: str, size: int, fields: str) -> Weight:
    """Describe the weight of a norm that multiplies by 1 + weight, in float32."""
    return vector(module, size, fields)._replace(is_float32=True, added=1.0)


def columns(module: str, axes: Iterable[Axis], inputs: int, fields: str) -> Weight:
    """Describe a linear layer whose outputs are divided: column-parallel."""
    axes = tuple(axes)
    size = sum(axis.size for axis in axes)
    return Weight(f"{module}.weight", (size, inputs), fields, axes, is_matrix=True)


def rows(module: str, outputs: int, axis: Axis, fields: str) -> Weight:
    """Describe a linear layer whose inputs are divided: row-parallel."""
    return Weight(f"{module}.weight", (outputs, axis.size), fields, (axis,), 1, is_matrix=True)


def layer_norms(
    name: str, config: ModelConfig, norm_of: Callable[[str, int, str], Weight] = vector
) -> Iterator[Weight]:
    """Describe the norms before the two halves of a layer. norm_of: describes a norm."""
    names = "input_layernorm", "post_attention_layernorm"
    return (norm_of(f"{name}.{norm}", config.hidden_size, "hidden_size") for norm in names)


def attention(name: str, config: ModelConfig, norm: Weight) -> Layer:
    """Describe grouped-query attention with a norm for each query and key head."""
    hidden, head_dim = config.hidden_size, config.head_dim
    heads = Axis("num_attention_heads", config.num_attention_heads, head_dim)
    kv_heads = Axis("num_key_value_heads", config.num_key_value_heads, head_dim, "shared")
    fields, kv_fields = (f"{axis.field} times head_dim" for axis in (heads, kv_heads))
    weights = (
        norm,
        vector(f"{name}.q_norm", head_dim, "head_dim"),
        vector(f"{name}.k_norm", head_dim, "head_dim"),
        columns(f"{name}.q_proj", [heads], hidden, fields),
        columns(f"{name}.k_proj", [kv_heads], hidden, kv_fields),
        columns(f"{name}.v_proj", [kv_heads], hidden, kv_fields),
        rows(f"{name}.o_proj", hidden, heads, fields),
    )
    return Layer("attention", weights, Heads(heads, kv_heads))


def mlp(name: str, config: ModelConfig, norm: Weight) -> Layer:
    """Describe a SwiGLU layer."""
    return Layer("mlp", (norm, *_swiglu(name, config, "intermediate_size")))


def experts(name: str, config: ModelConfig, norm: Weight) -> Layer:
    """Describe a mixture of SwiGLU experts with its router."""
    number = Axis("num_experts", config.expert_count)
    router = Weight(f"{name}.gate.weight", (number.units, config.hidden_size), number.field)
    swiglu = _swiglu(f"{name}.experts.{{}}", config, "moe_intermediate_size")
    return Layer("experts", (norm, router, *(weight._replace(experts=number) for weight in swiglu)))


def shared_expert(name: str, config: ModelConfig) -> Layer:
    """Describe an expert of all tokens, with a gate, beside `experts`, which has its norm."""
    gate = Weight(f"{name}.shared_expert_gate.weight", (1, config.hidden_size), "hidden_size")
    swiglu = _swiglu(f"{name}.shared_expert", config, "shared_expert_intermediate_size")
    return Layer("shared expert", (gate, *swiglu))


def _swiglu(name: str, config: ModelConfig, field: str) -> tuple[Weight, ...]:
    """Describe the matrices; field: field of the config with the number of inner features."""
    hidden, inner = config.hidden_size, Axis(field, getattr(config, field))
    return (
        columns(f"{name}.gate_proj", [inner], hidden, field),
        columns(f"{name}.up_proj", [inner], hidden, field),
        rows(f"{name}.down_proj", hidden, inner, field),
    )


def decoder(
    config: ModelConfig,
    layers: Iterable[Layer],
    name: str = "model",
    norm_of: Callable[[str, int, str], Weight] = vector,
) -> Architecture:
    """Describe a decoder: an embedding, `layers`, a norm, and an output layer unless tied.

    name: name of the module in the checkpoint. norm_of: describes a norm.
    """
    vocabulary = Axis("vocab_size", config.vocab_size, division="padded")
    shape = config.vocab_size, config.hidden_size
    embedding, head = (
        Weight(f"{module}.weight", shape, "vocab_size and hidden_size", (vocabulary,))
        for module in (f"{name}.embed_tokens", "lm_head")
    )
    norm = norm_of(f"{name}.norm", config.hidden_size, "hidden_size")
    heads = () if config.tie_word_embeddings else (Layer("head", (head,)),)
    first = Layer("embedding", (embedding,))
    return Architecture((first, *layers, Layer("norm", (norm,)), *heads))


def qwen3(config: ModelConfig) -> Architecture:
    """Describe Qwen3 or Qwen3-MoE, in which some or all layers have experts."""
    if config.reads_mtp:
        found = "got mtp, expected none or ngram: Qwen3 has no layer of multi-token prediction"
        raise ModelError(f"speculative_method: {found}")
    layers = []
    for index in range(config.num_hidden_layers):
        name = f"model.layers.{index}"
        first, second = layer_norms(name, config)
        layers.append(attention(f"{name}.self_attn", config, first))
        inner = experts if config.is_sparse(index) else mlp
        layers.append(inner(f"{name}.mlp", config, second))
    return decoder(config, layers)


def qwen3_5(config: ModelConfig) -> Architecture:
    """Describe the text part of Qwen3.5 or Qwen3-Next, with experts or without.

    Some layers are gated DeltaNet, the others gated attention.
    """
    model = "model.language_model" if config.is_multimodal else "model"

    def block(name: str, kind: str, is_sparse: bool) -> Iterator[Layer]:
        first, second = layer_norms(name, config, zero_centered)
        if kind == FULL_ATTENTION:
            yield gated_attention(f"{name}.self_attn", config, first)
        else:
            yield delta_net(f"{name}.linear_attn", config, first)
        if is_sparse:
            yield experts(f"{name}.mlp", config, second)
            yield shared_expert(f"{name}.mlp", config)
        else:
            yield mlp(f"{name}.mlp", config, second)

    layers = [
        layer
        for index, kind in enumerate(config.kinds_of_layers)
        for layer in block(f"{model}.layers.{index}", kind, config.is_sparse(index))
    ]
    architecture = decoder(config, layers, model, zero_centered)
    if not config.reads_mtp:
        return architecture
    if config.mtp_use_dedicated_embeddings:
        raise ModelError("speculative_method: got mtp, expected none: mtp_use_dedicated_embeddings")
    last = block("mtp.layers.0", FULL_ATTENTION, config.expert_count > 0)
    return architecture._replace(mtp=multi_token_prediction(config.hidden_size, last))


def multi_token_prediction(hidden: int, block: Iterable[Layer]) -> tuple[Layer, ...]:
    """Describe the layer that predicts the token after the next one, around a decoder's `block`."""
    names = "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"
    *norms, last = (zero_centered(f"mtp.{name}", hidden, "hidden_size") for name in names)
    joined = Weight("mtp.fc.weight", (hidden, 2 * hidden), "hidden_size")
    return Layer("mtp", (*norms, joined)), *block, Layer("norm", (last,))


def gated_attention(name: str, config: ModelConfig, norm: Weight) -> Layer:
    """Describe attention with a gate beside each query head, and norms of 1 + weight."""
    plain, head_dim = attention(name, config, norm), config.head_dim
    gated = Axis("num_attention_heads", config.num_attention_heads, 2 * head_dim)
    fields = f"{gated.field} times twice head_dim"
    changed = {
        "q_norm": zero_centered(f"{name}.q_norm", head_dim, "head_dim"),
        "k_norm": zero_centered(f"{name}.k_norm", head_dim, "head_dim"),
        "q_proj": columns(f"{name}.q_proj", [gated], config.hidden_size, fields),
    }
    weights = tuple(changed.get(weight.module, weight) for weight in plain.weights)
    return plain._replace(weights=weights)


def delta_net(name: str, config: ModelConfig, norm: Weight) -> Layer:
    """Describe gated DeltaNet, with its state (`penstock.kernels.recurrent.delta_rule`)."""
    hidden, kernel = config.hidden_size, config.linear_conv_kernel_dim
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    keys = Axis("linear_num_key_heads", config.linear_num_key_heads, key_dim)
    values = Axis("linear_num_value_heads", config.linear_num_value_heads, value_dim)
    heads, channels = values._replace(unit_size=1), (keys, keys, values)
    num_channels = sum(axis.size for axis in channels)
    fields = "the numbers of linear heads times their dimensions"
    if config.interleaves_keys:
        joined = channels[:2] + 2 * (keys._replace(unit_size=values.size // keys.units),)
        gates = 2 * (keys._replace(unit_size=heads.units // keys.units),)
        inputs = [
            columns(f"{name}.in_proj_qkvz", joined, hidden, fields)._replace(is_interleaved=True),
            columns(f"{name}.in_proj_ba", gates, hidden, fields)._replace(is_interleaved=True),
        ]
    else:
        inputs = [
            columns(f"{name}.in_proj_qkv", channels, hidden, fields),
            columns(f"{name}.in_proj_z", [values], hidden, fields),
            columns(f"{name}.in_proj_b", [heads], hidden, heads.field),
            columns(f"{name}.in_proj_a", [heads], hidden, heads.field),
        ]
    # gates have 16 bits in every format
    inputs = [weight._replace(is_matrix=weight.shape[0] > 2 * heads.units) for weight in inputs]
    decays = (
        Weight(f"{name}.{decay}", (heads.units,), heads.field, (heads,), is_float32=True)
        for decay in ("A_log", "dt_bias")
    )
    weights = (
        norm,
        *inputs,
        Weight(f"{name}.conv1d.weight", (num_channels, 1, kernel), fields, channels),
        *decays,
        vector(f"{name}.norm", value_dim, "linear_value_head_dim"),
        rows(f"{name}.out_proj", hidden, values, fields),
    )
    states = (
        State((heads,), (key_dim, value_dim)),
        State(channels, (kernel - 1,), dim=1),
        State(channels, (STATE_WINDOW,), dim=1),
        State((heads,), (STATE_WINDOW, 2)),
    )
    return Layer("delta", weights, state=states)


class Family(NamedTuple):
    """Models with the same kind of description and computation."""

    describe: Callable[[ModelConfig], Architecture]
    module: str  # module with `Decoder`, the forward pass


QWEN3 = Family(qwen3, "penstock.models.qwen3")
QWEN3_5 = Family(qwen3_5, "penstock.models.qwen3_5")
# by names in config.json, which are also in `SERVED` of protocol/checkpoint.py
FAMILIES = {
    "Qwen3ForCausalLM": QWEN3,
    "Qwen3MoeForCausalLM": QWEN3,
    "Qwen3Model": QWEN3,
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5ForConditionalGeneration": QWEN3_5,
    "Qwen3_5MoeForCausalLM": QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": QWEN3_5,
    "Qwen3NextForCausalLM": QWEN3_5,
}


def family_of(config: ModelConfig) -> Family:
    """Return the family of a checkpoint accepted by `read_model_config`."""
    return next(FAMILIES[name] for name in config.architectures if name in FAMILIES)


def describe(config: ModelConfig) -> Architecture:
    """Return the description of a model."""
    return family_of(config).describe(config)
