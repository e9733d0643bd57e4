"""Qwen3's mixture of experts, in place of the MLP of some layers or of all.

The ranks of a group divide either every expert's inner features (tensor parallelism) or the experts
(expert parallelism). Each rank routes all tokens and adds the outputs of its share. The sums are
reduced as after any other layer.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from penstock.kernels.moe import norm_moe
from penstock.models.allocation import add_weight
from penstock.models.parallel import Layer, RMSNorm, Slice, WholeLayer
from penstock.models.tensor_parallel import TensorParallel
from penstock.protocol.checkpoint import ModelConfig
from penstock.protocol.quantization import WeightFormat


class Experts(Layer):
    """Adjacent linear layers of each expert: [local experts, out_features, in_features]."""

    def __init__(
        self,
        names: tuple[str, ...],
        shape: tuple[int, int],
        dim: int,
        num_parts: int,
        part: int,
        experts: range,
        num_experts: int,
        weight_format: WeightFormat | None,
    ) -> None:
        """Allocate the weights.

        names: of an expert's layers in the checkpoint. shape: of each layer, whose dimension `dim`
        is cut into `num_parts`; this rank has `part`. experts: of this rank.
        """
        super().__init__()
        self.names, self.shape, self.dim, self.part = names, shape, dim, part
        self.experts, self.num_experts = experts, num_experts
        sizes = list(shape)
        sizes[dim] //= num_parts
        self.size = sizes[dim]
        self.num_rows = sizes[0]
        if weight_format and (num_parts > 1 or len(names) > 1):
            rows, columns = ((), sizes[1]) if dim else (sizes[:1], 0)
            weight_format = weight_format.after_cut(rows, columns)
        all_shapes = len(experts), len(names) * sizes[0], sizes[1]
        add_weight(self, *all_shapes, weight_format=weight_format)

    def slices(self, name: str) -> Iterator[Slice]:
        """Yield slices of every expert, empty for experts of other ranks."""
        parent = name.rpartition(".")[0]
        start = self.part * self.size
        for expert in range(self.num_experts):
            is_here = expert in self.experts
            weight = self.weight[expert - self.experts.start if is_here else 0]
            targets = weight.split([self.num_rows] * len(self.names))
            for layer, target in zip(self.names, targets, strict=True):
                tensor = f"{parent}.experts.{expert}.{layer}.weight"
                if is_here:
                    yield Slice(tensor, self.shape, self.dim, start, start + self.size, target)
                else:
                    yield Slice(tensor, self.shape, 0, 0, 0, target[:0])


class MoE(nn.Module):
    """A mixture of experts: a router chooses the experts of each token."""

    def __init__(
        self, config: ModelConfig, tp: TensorParallel, expert_parallel: bool, name: str
    ) -> None:
        """Make the layers.

        expert_parallel: each rank has whole experts, not parts of all. name: in the checkpoint.
        """
        super().__init__()
        self.tp = tp
        self.top_k = config.num_experts_per_tok
        self.normalize = config.norm_topk_prob
        num_experts = config.expert_count
        num_here = num_experts // tp.size if expert_parallel else num_experts
        self.first = tp.rank * num_here if expert_parallel else 0
        cut = (1, 0) if expert_parallel else (tp.size, tp.rank)
        experts = range(self.first, self.first + num_here)
        weight_format = config.format_of(f"{name}.experts.0", "gate_proj", "up_proj", "down_proj")
        here = (*cut, experts, num_experts, weight_format)
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.gate = WholeLayer(num_experts, hidden)
        self.gate_up_proj = Experts(("gate_proj", "up_proj"), (inner, hidden), 0, *here)
        self.down_proj = Experts(("down_proj",), (hidden, inner), 1, *here)

    def forward(self, residual: Tensor, norm: RMSNorm) -> Tensor:
        """Return residual [num_tokens, hidden_size] plus the experts' output for its norm."""
        num_tokens, hidden_size = residual.shape
        part = norm_moe(
            residual,
            norm.weight,
            norm.eps,
            self.gate.weight,
            self.gate_up_proj.weight,
            self.down_proj.weight,
            top_k=self.top_k,
            normalize=self.normalize,
            first_expert=self.first,
            add=self.tp.size == 1,
            out=self.tp.empty(num_tokens, hidden_size, residual.dtype),
        )
        return part if self.tp.size == 1 else self.tp.all_reduce(part, residual)

    @property
    def num_idle_weights(self) -> int:
        """Number of this rank's weights that are not multiplied with a token, on average."""
        weights = self.gate_up_proj.weight, self.down_proj.weight
        num_weights = sum(weight.shape.numel() for weight in weights)
        return num_weights - num_weights * self.top_k // len(self.gate.weight)
