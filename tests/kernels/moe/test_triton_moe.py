"""The kernels of a mixture of experts against the reference: routing, sorting, products, sum."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.kernels import moe as reference
from penstock.kernels import triton_moe as moe
from penstock.kernels.elementwise import quantize, quantize_blocks, rms_norm
from penstock.kernels.matrices import FP8, Matrix, Quantized
from penstock.kernels.moe import norm_moe
from penstock.kernels.triton_moe import (
    GemmTile,
    MoeTuning,
    choose_tuning,
    experts,
    sort_by_expert,
)
from tests.kernels.conftest import by_turns, on_gpu, there

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
"""the interpreter's, where a padded token has no probabilities"""

SMALL = MoeTuning(16, GemmTile(16, 32, 4, 2), GemmTile(32, 16, 4, 2))
UNEVEN = MoeTuning(32, GemmTile(32, 64, 4, 2), GemmTile(16, 32, 4, 2))


def operands(tokens: int, num_experts: int, hidden: int, size: int) -> tuple[Tensor, ...]:
    """x, logits, gate_up, down: random float32."""
    return (
        torch.randn(tokens, hidden),
        torch.randn(tokens, num_experts) * 2,
        torch.randn(num_experts, 2 * size, hidden) / hidden**0.5,
        torch.randn(num_experts, hidden, size) / size**0.5,
    )


def expected(
    x: Tensor,
    logits: Tensor,
    gate_up: Tensor,
    down: Tensor,
    top_k: int,
    normalize: bool,
    first: int,
    shared: bool = False,
) -> Tensor:
    ids, weights = reference.route(logits, top_k, normalize, shared)
    return reference.experts_outputs(x, ids - first, weights, gate_up, down)


def assert_sorted(
    logits: Tensor, top_k: int, first: int, num_here: int, bm: int, shared: bool = False
) -> None:
    """Every pair here is in one tile, of its own expert, where its token looks for it."""
    routing = sort_by_expert(logits, top_k, shared, first, num_here, bm, shared)
    weights, sources, places, tiles = (tensor.cpu() for tensor in routing)
    ids, wanted = reference.route(logits.cpu(), top_k, shared, shared)
    torch.testing.assert_close(weights, wanted, atol=1e-6, rtol=1e-5)
    pairs = Counter()  # type: ignore[var-annotated]
    owners = {}
    for expert, begin, end, _ in tiles[1 : 1 + tiles[0, 0]].tolist():
        for pair in range(begin, min(begin + bm, end)):
            owners[pair] = expert
            pairs[int(sources[pair]), expert + first] += 1
    here = (ids >= first) & (ids < first + num_here)
    assert pairs == Counter(
        (token, expert)
        for token, row in enumerate(ids.tolist())
        for expert in row
        if first <= expert < first + num_here
    )
    assert torch.equal(places >= 0, here)
    for token, place in here.nonzero().tolist():
        pair = int(places[token, place])
        assert (int(sources[pair]), owners[pair] + first) == (token, int(ids[token, place]))


@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k", "first", "num_here"),
    [
        (1, 64, 8, 0, 64),
        (15, 6, 2, 0, 6),
        (50, 20, 3, 5, 10),
        (64, 5, 5, 0, 5),
        (130, 20, 3, 6, 9),
        *(on_gpu(1, 128, 8, 64, 64), on_gpu(64, 128, 8, 0, 128), on_gpu(8192, 128, 8, 0, 128)),
        *(on_gpu(5000, 128, 8, 96, 32), on_gpu(20000, 60, 4, 0, 60)),
    ],
)
def test_pairs_are_sorted_by_expert(
    tokens: int, num_experts: int, top_k: int, first: int, num_here: int, device: str
) -> None:
    logits = torch.randn(tokens, num_experts, device=device)
    for bm in (16, 64)[: 1 + (device == "cuda")]:
        assert_sorted(logits, top_k, first, num_here, bm)


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 8), (2, 8), (20, 3), (130, 7), on_gpu(5000, 8)])
def test_the_shared_expert_follows(tokens: int, top_k: int, device: str) -> None:
    """256 experts and one more on a GPU, as in Qwen3.5-35B-A3B, then fewer experts than tiles."""
    most = 257 if device == "cuda" else 17
    logits = torch.randn(tokens, most, device=device)
    assert_sorted(logits, top_k, 0, most, 16, shared=True)
    assert_sorted(logits[:, :3].contiguous(), 2, 0, 3, 16, shared=True)


def test_all_tokens_choose_the_same_experts(device: str) -> None:
    logits = torch.randn(1, 12).repeat(70, 1).to(device)
    assert_sorted(logits, 3, 0, 12, 16)


@pytest.mark.parametrize("many", [torch.nan, -torch.inf])
def test_void_logits_choose_existing_experts(many: float, device: str) -> None:
    for tokens in (4, 70):
        logits = torch.full((tokens, 6), many, device=device)
        _, sources, places, tiles = sort_by_expert(logits, 2, True, 0, 6, 16)
        assert ((places >= 0) & (places < 2 * tokens)).all()
        assert sorted(sources[:tokens].tolist()) == list(range(tokens))
        assert tiles[0, 0] == -(-tokens // 16)


def in_8_bits(weight: Tensor) -> Quantized:
    """Each expert's rows with a scale, spread over some powers of two."""
    spread = 2.0 ** torch.arange(weight.shape[1])[:, None].remainder(5)
    one_by_one = [quantize(expert * spread) for expert in weight]
    values, scales = zip(
        *((one.values, one.scale / spread[:, 0]) for one in one_by_one), strict=True
    )
    return Quantized(torch.stack(values), torch.stack(scales))


def in_blocks(weight: Tensor) -> Quantized:
    """Each expert's blocks with a scale, far from its neighbours'."""
    each = [quantize_blocks(expert) for expert in weight]
    values, scales = (torch.stack([getattr(one, n) for one in each]) for n in ("values", "scale"))
    return Quantized(values, scales * torch.logspace(-1, 1, scales.numel()).view_as(scales))


@pytest.mark.slow
@by_turns(
    "tokens, tuning, sizes, narrow",
    *((1, SMALL, (40, 24), in_8_bits), (20, UNEVEN, (40, 24), in_8_bits)),
    (1, SMALL, (144, 128), in_blocks),
    *(on_gpu(70, SMALL, (40, 24), in_8_bits), on_gpu(70, UNEVEN, (40, 24), in_8_bits)),
    *(on_gpu(70, SMALL, (400, 256), in_blocks), on_gpu(70, UNEVEN, (400, 256), in_blocks)),
)
@pytest.mark.usefixtures("e4m3")
def test_small_experts_in_8_bits(
    tokens: int,
    tuning: MoeTuning,
    sizes: tuple[int, int],
    narrow: Callable[[Tensor], Quantized],
    device: str,
    dtype: torch.dtype,
) -> None:
    x, logits, *plain = operands(tokens, 6, *sizes)
    weights = [narrow(weight) for weight in plain]
    stand_for = [weight.dequantized() for weight in weights]
    wanted = expected(x, logits, *stand_for, 3, True, 0)
    moved = [there(device, weight) for weight in weights]
    out = experts(x.to(device, dtype), logits.to(device), *moved, 3, True, tuning=tuning)
    error = (out.cpu().double() - wanted.double()).norm() / wanted.double().norm()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "tuning", "hidden"),
    [
        *((1, SMALL, 40), (20, UNEVEN, 40), on_gpu(70, SMALL, 40), on_gpu(70, UNEVEN, 40)),
        *((1, None, 40), (1, None, moe.ONE.bk)),  # the tiles of a single token
        (1, None, moe.ONE.bk + 40),  # which are not for more features
    ],
)
def test_small_experts(
    tokens: int, tuning: MoeTuning | None, hidden: int, device: str, dtype: torch.dtype
) -> None:
    x, logits, gate_up, down = operands(tokens, 6, hidden, 24)
    for first, normalize, add, shared in (
        *((0, True, True, False), (2, False, False, False)),
        *((2, True, True, True), (2, False, False, True)),
    ):
        here = gate_up[first : first + 4], down[first : first + 4]
        wanted = expected(x, logits, *here, 3, normalize, first, shared) + (x if add else 0)
        rows, router, *weights = (one.to(device) for one in (x, logits, *here))
        rows, *weights = (one.to(dtype).contiguous() for one in (rows, *weights))
        residual = rows if add else None
        options = (router, *weights, 3, normalize, first, shared, residual, None, tuning)
        out = experts(rows, *options)
        error = (out.cpu().double() - wanted.double()).norm() / wanted.double().norm()
        assert error < (1e-5 if dtype == torch.float32 else 1e-2)
        assert torch.equal(experts(rows, *options), out)


@pytest.mark.slow
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("top_k", "hidden", "size", "is_one_kernel"),
    [(2, 40, 16, True), (4, 40, 32, True), (4, 36, 32, False), (4, 40, 24, False)],
)
def test_one_token_and_all_experts(
    monkeypatch: pytest.MonkeyPatch,
    top_k: int,
    hidden: int,
    size: int,
    is_one_kernel: bool,
    shared: bool,
    add: bool,
    device: str,
    dtype: torch.dtype,
) -> None:
    """One kernel computes `down` and the sum, for sizes that its tiles divide."""
    unused = "combine" if is_one_kernel else "add_experts"
    monkeypatch.setattr(moe, unused, None)
    x, logits, gate_up, down = operands(1, 6, hidden, size)
    wanted = expected(x, logits, gate_up, down, top_k, True, 0, shared) + (x if add else 0)
    router, rows = logits.to(device), x.to(device, dtype)
    weights = [tensor.to(device, dtype) for tensor in (gate_up, down)]
    out = experts(rows, router, *weights, top_k, True, 0, shared, rows if add else None)
    error = (out.cpu().double() - wanted.double()).norm() / wanted.double().norm()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize(
    ("tokens", "hidden", "is_one_kernel"),
    [
        *((1, 64, True), (1, 48, True), (3, 64, False)),
        *(on_gpu(1, 40, False), on_gpu(1, 2048, True), on_gpu(64, 2048, False)),
    ],
)
def test_the_norm_before_the_router(
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    hidden: int,
    is_one_kernel: bool,
    device: str,
    dtype: torch.dtype,
) -> None:
    """One kernel computes it for a single token, whose hidden features fill chunks of 16."""
    if is_one_kernel:
        monkeypatch.setattr(moe, "rms_norm", None)
    weight = torch.randn(257, hidden) / hidden**0.5
    some = torch.randn(tokens, hidden) * 30, torch.rand(hidden), weight
    x, norm_weight, weight = (tensor.to(device, dtype) for tensor in some)
    normed, logits = moe.norm_and_logits(x, norm_weight, 1e-6, weight)
    wanted = rms_norm(x.cpu().float(), norm_weight.cpu().float(), 1e-6)
    close = {"atol": 1e-4, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.02}
    torch.testing.assert_close(normed.cpu().float(), wanted, **close)
    torch.testing.assert_close(logits.cpu(), wanted @ weight.cpu().float().T, **close)


@pytest.mark.gpu
def test_layers_of_one_token_choose_other_experts() -> None:
    """Layers follow each other in a graph, and their routes lie in the same memory."""
    num_layers, weights = 16, [w.cuda().bfloat16() for w in operands(1, 65, 2048, 512)[2:]]
    x = torch.randn(1, 2048, device="cuda").bfloat16()
    logits = torch.randn(num_layers, 1, 65, device="cuda")

    def run(tuning: MoeTuning | None = None) -> list[Tensor]:
        return [experts(x, row, *weights, 8, True, 0, True, x, None, tuning) for row in logits]

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(50):
        logits.copy_(torch.randn(num_layers, 1, 65) * 3)
        graph.replay()
        for out, wanted in zip(found, run(moe.NARROW), strict=True):
            assert (out.float() - wanted.float()).norm() / wanted.float().norm() < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 16, 64, 200, 500, 2048])
@pytest.mark.parametrize("first", [0, 64])
@pytest.mark.parametrize("is_fp8", [False, True])
def test_experts_of_30b(tokens: int, first: int, is_fp8: bool) -> None:
    with torch.device("cuda"):
        x, _, gate_up, down = (one.bfloat16() for one in operands(tokens, 128, 2048, 768))
        router, norm_weight = torch.randn(128, 2048).bfloat16() / 45, torch.rand(2048).bfloat16()
    here: tuple[Matrix, Matrix] = gate_up[first : first + 64], down[first : first + 64]
    if is_fp8:
        whole = [
            Quantized(one.to(FP8), torch.full(one.shape[:2], 2.0, device="cuda"))
            for one in (gate_up, down)
        ]
        here = whole[0][first : first + 64], whole[1][first : first + 64]
        gate_up, down = (one.values.bfloat16() * 2 for one in whole)
    options = {"top_k": 8, "normalize": True, "first_expert": first}
    out = norm_moe(x, norm_weight, 1e-6, router, *here, **options, add=False)
    added = norm_moe(x, norm_weight, 1e-6, router, *here, **options)
    torch.testing.assert_close(added.float(), x.float() + out.float(), atol=0.01, rtol=0.01)
    normed = rms_norm(x, norm_weight, 1e-6)
    logits = moe.router_logits(normed, router)
    torch.testing.assert_close(logits, normed.float() @ router.float().T, atol=1e-3, rtol=1e-3)
    ids, weights = reference.route(logits, 8, True)
    wanted = torch.zeros_like(x, dtype=torch.float32)
    for place in range(8):
        for expert in range(first, first + 64):
            (rows,) = (ids[:, place] == expert).nonzero(as_tuple=True)
            gate, up = (normed[rows] @ gate_up[expert].T).float().chunk(2, -1)
            activated = torch.nn.functional.silu(gate) * up @ down[expert].T.float()
            wanted[rows] += weights[rows, place, None] * activated
    assert (out.float() - wanted).norm() / wanted.norm() < 1e-2


@pytest.mark.gpu
def test_a_graph_is_replayed_for_other_experts() -> None:
    x, logits, gate_up, down = (one.cuda() for one in operands(4, 32, 256, 64))
    tensors = [one.bfloat16() for one in (x, gate_up, down)]

    def run() -> Tensor:
        return experts(tensors[0], logits, *tensors[1:], 4, True)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(3):
        logits.copy_(torch.randn(4, 32))
        graph.replay()
        assert torch.equal(out, run())


def test_tunings_for_few_and_many() -> None:
    assert choose_tuning(8, 128, 768) == moe.NARROW
    assert [choose_tuning(8 * tokens, 128, 768).bm for tokens in (16, 128, 200, 1000, 8192)] == [
        *(16, 16, 32, 64, 128)
    ]
    assert moe.tuning_of_one(moe.NARROW, 2048) == (16, moe.ONE, moe.NARROW.down, 1)
    assert moe.tuning_of_one(moe.NARROW, 4096) == moe.NARROW
    in_fp8 = [choose_tuning(8 * tokens, 128, 768, is_fp8=True).bm for tokens in (1, 200, 8192)]
    assert in_fp8 == [16, 32, 64]


@pytest.mark.usefixtures("tensor_cores", "deterministic")
def test_deterministic_tokens_have_the_same_bits_for_every_number_of_tokens(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other tile sizes for each number, and the router's product."""
    monkeypatch.setattr(moe, "choose_tuning", lambda pairs, *_: SMALL if pairs < 100 else UNEVEN)
    some = operands(70, 8, 64, 32)
    x, _, gate_up, down = (one.to(device, dtype) for one in some)
    router = torch.randn(8, 64).to(device, dtype)

    def run(x: Tensor) -> Tensor:
        return experts(x, moe.router_logits(x, router), gate_up, down, 2, True)

    whole = run(x)
    for tokens in (1, 3, 17, 64):
        assert torch.equal(run(x[-tokens:].contiguous()), whole[-tokens:])
    many = moe.norm_and_logits(x, x[0], 1e-6, router)
    for index, row in enumerate(x.split(1)):
        alone = moe.norm_and_logits(row, x[0], 1e-6, router)
        assert all(torch.equal(a[0], b[index]) for a, b in zip(alone, many, strict=True))
