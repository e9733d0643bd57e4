"""A few layers of Qwen3 decoding, in which `penstock.kernels.bench.linear` tunes the products.

The time of a product depends on its neighbors: a kernel that starts early, a kernel that can't
overlap, an input that was just written. Products are therefore timed in their place.
"""

import torch
from torch import Tensor

from penstock.kernels.attention.rope import qk_norm_rope_store
from penstock.kernels.attention.triton_decode import DecodeAttention
from penstock.kernels.bench.fastest import Configs
from penstock.kernels.bench.timing import graph_us, l2_bytes
from penstock.kernels.layouts.kv_cache import KVCache
from penstock.kernels.linear import linear
from penstock.kernels.linear.gemm_candidates import HEAD_DIM, SIZES, GemmShape, shapes
from penstock.kernels.linear.gemm_config import GemmConfig
from penstock.kernels.linear.small_m_gemm import Product, empty_product, launch
from penstock.kernels.quantize.types import FP8, Quantized, Rows, parts

CONTEXT = 384  # tokens: the middle of 256 in, 256 out
BLOCK_SIZE = 128
EPS = 1e-6


def separately(product: Product, dtype: torch.dtype = torch.bfloat16) -> Rows:
    """Multiply by cuBLAS, with separate kernels for norm, activation and sum."""
    if product.norm_weight is None:
        if product.residual is None:
            raise ValueError("product: got neither norm nor residual, expected one of them")
        return linear.add_separately(product.x, product.weight, product.residual)
    if product.swiglu:
        return linear.swiglu_separately(product.x, product.norm_weight, EPS, product.weight)
    return linear.norm_separately(product.x, product.norm_weight, EPS, product.weight, dtype)


def cut(pool: Tensor, shape: GemmShape, begin: int = 0) -> Rows:
    """Return a weight of the pool's elements from `begin` on, Quantized if in 8 bits."""
    values = pool[begin : begin + shape.num_weights * shape.inner].view(-1, shape.inner)
    if pool.dtype != FP8:
        return values
    return Quantized(values, torch.full((len(values),), 0.02, device=pool.device))


class Layers:
    """Layers of one published size that decode `rows` rows, with weights beyond the L2 cache."""

    def __init__(self, size: str, rows: int, pool: Tensor) -> None:
        """Cut weights from `pool`, random numbers in bfloat16 or 8 bits."""
        hidden, _, self.heads, self.kv_heads = SIZES[size]
        self.shapes = shapes(size)[:4]
        num_weights = sum(shape.num_weights * shape.inner for shape in self.shapes)
        self.num_layers = max(2, -(-4 * l2_bytes() // (num_weights * pool.itemsize)))
        self.weights = _cut_all(pool, self.shapes * self.num_layers)
        self.x = torch.randn(rows, hidden, dtype=torch.bfloat16, device="cuda")
        self.norm_weight = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
        self.head_norm = torch.ones(HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        self.rope = torch.randn(CONTEXT, HEAD_DIM, device="cuda")
        blocks = -(-CONTEXT // BLOCK_SIZE)
        shape = (self.num_layers, 2, rows * blocks, BLOCK_SIZE, self.kv_heads, HEAD_DIM)
        self.kv_cache = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        self.tables = torch.arange(rows * blocks, dtype=torch.int32, device="cuda").view(rows, -1)
        self.positions = torch.full((rows,), CONTEXT - 1, device="cuda")
        self.slots = self.tables[:, -1].long() * BLOCK_SIZE + (CONTEXT - 1) % BLOCK_SIZE
        self.context_lens = torch.full((rows,), CONTEXT, dtype=torch.int32, device="cuda")
        layout = (rows, self.heads, self.kv_heads, HEAD_DIM, BLOCK_SIZE, "cuda")
        self.attention = DecodeAttention(*layout)
        self.attention.plan(self.context_lens)
        torch.cuda.synchronize()

    def us(self, configs: Configs) -> float:
        """Return microseconds of a layer; a config of None is cuBLAS."""
        return graph_us([lambda: self.run(configs)], 3, 400) / self.num_layers

    def run(self, configs: Configs) -> Tensor:
        residual = self.x.clone()  # cuBLAS adds to it in place
        for layer in range(self.num_layers):
            qkv_proj, o_proj, gate_up_proj, down_proj = self.weights[4 * layer : 4 * layer + 4]
            qkv, o, gate_up, down = (configs[shape] for shape in self.shapes)
            heads = self._multiply(qkv, "norm", residual, qkv_proj)
            attended = self._attend(heads, layer)
            residual = self._multiply(o, "add", attended, o_proj, residual)
            activated = self._multiply(gate_up, "swiglu", residual, gate_up_proj)
            residual = self._multiply(down, "add", activated, down_proj, residual)
        return residual

    def _multiply(
        self,
        config: GemmConfig | None,
        kind: str,
        x: Tensor,
        weight: Rows,
        residual: Tensor | None = None,
    ) -> Tensor:
        norm_weight = self.norm_weight if residual is None else None
        product = empty_product(kind, x, weight, norm_weight, EPS, residual)
        if config is None:
            return parts(separately(product))[0]
        launch(product, config)
        return product.out

    def _attend(self, qkv: Tensor, layer: int) -> Tensor:
        kv_cache = KVCache(*self.kv_cache[layer])
        q = qk_norm_rope_store(
            qkv,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            q_weight=self.head_norm,
            k_weight=self.head_norm,
            rope=self.rope,
            positions=self.positions,
            slot_mapping=self.slots,
            kv_cache=kv_cache,
            eps=EPS,
        )
        out = torch.empty_like(q)
        lengths = {"context_lens": self.context_lens, "block_tables": self.tables}
        self.attention(q, kv_cache, **lengths, scale=HEAD_DIM**-0.5, out=out)
        return out.flatten(1)


def _cut_all(pool: Tensor, wanted: list[GemmShape]) -> list[Rows]:
    """Return adjacent weights, starting over at the end of the pool."""
    begin, weights = 0, []
    for shape in wanted:
        size = shape.num_weights * shape.inner
        begin = begin if begin + size <= len(pool) else 0
        weights.append(cut(pool, shape, begin))
        begin += size
    return weights
