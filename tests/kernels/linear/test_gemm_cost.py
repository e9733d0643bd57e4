"""The estimated cost of tile sizes, compared with what was measured on an H200."""

import pytest

from penstock.kernels.device import Device, simulated
from penstock.kernels.linear.tile_sizes import GemmShape, candidates, cheapest, cost
from penstock.kernels.linear.tuning_tables import packaged_tables
from tests.kernels.compile_launches import GPUS

H200 = Device()
MEASURED = [
    (GemmShape(*key[:3]), key[3], weight_bytes, config)
    for dtype, weight_bytes in (("bfloat16", 2), ("fp8", 1))
    for key, config in packaged_tables()[dtype].items()
    if key[3] > 1
]


def test_decides_for_or_against_cublas_mostly_as_measured() -> None:
    agreed = [
        (config is None) == (cheapest(*product, H200) is None) for *product, config in MEASURED
    ]
    assert sum(agreed) / len(agreed) > 0.8


def test_the_fastest_tile_sizes_are_estimated_near_the_best() -> None:
    ratios = []
    for *product, config in MEASURED:
        best = cheapest(*product, H200)
        if config and config.kernel != "ranges" and best:  # which the estimate does not choose
            outside = config._replace(norm_inside=False)
            ratios.append(cost(*product, outside, H200) / cost(*product, best, H200))
    ratios.sort()
    assert ratios[int(0.9 * len(ratios))] < 1.5


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("weight_bytes", [1, 2])
def test_a_choice_is_a_candidate_that_fits(gpu: str, weight_bytes: int) -> None:
    device = simulated(gpu)
    for shape in (GemmShape("add", 4096, 12288), GemmShape("swiglu", 24576, 4096)):
        chosen = cheapest(shape, 16, weight_bytes, device)
        assert chosen in candidates(shape, 16, weight_bytes, device)


def test_few_columns_are_split_on_a_large_gpu_only() -> None:
    shape = GemmShape("add", 1024, 3072)
    large, small = (cheapest(shape, 16, 2, Device((8, 0), 163 << 10, n)) for n in (108, 14))
    assert large
    assert large.split_k * 1024 // large.bn >= 100
    assert small
    assert small.split_k <= large.split_k


def test_a_larger_share_costs_more() -> None:
    shape = GemmShape("add", 4096, 4096)
    for config in candidates(shape, 16, 2, H200):
        alone = cost(shape, 16, 2, config, H200)
        assert cost(shape, 16, 2, config, H200._replace(num_sms=20)) > alone
        assert cost(shape, 16, 1, config, H200) < alone * 1.5


def test_a_weight_without_candidates_goes_to_cublas() -> None:
    assert cheapest(GemmShape("logits", 128, 2048), 16, 2, H200) is None
