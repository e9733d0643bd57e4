"""Tuning by measurements, with a clock of ours."""

from collections.abc import Sequence

from penstock.kernels.bench.timing import ROUNDS, Configs, fastest_in_turn
from penstock.kernels.linear.tile_sizes import GemmConfig, GemmShape

QKV, DOWN = GemmShape("norm", 4096, 1024), GemmShape("add", 1024, 3072)
WAYS = [GemmConfig("mma", bn, 128, 1, 4, 3, 0) for bn in (16, 32, 64)]
TIMES = {None: 10.0, WAYS[0]: 12.0, WAYS[1]: 7.0, WAYS[2]: 8.0}


def additive(configs: Configs) -> float:
    return sum(TIMES[config] for config in configs.values())


def test_each_product_gets_its_fastest() -> None:
    configs, separate, best = fastest_in_turn([QKV, DOWN], lambda _: WAYS, additive)
    assert configs == {QKV: WAYS[1], DOWN: WAYS[1]}
    assert (separate, best) == (20.0, 14.0)


def test_cublas_stays_where_nothing_is_faster() -> None:
    def right(shape: GemmShape) -> Sequence[GemmConfig]:
        return WAYS[:1] if shape == QKV else []

    configs, separate, best = fastest_in_turn([QKV, DOWN], right, additive)
    assert configs == {QKV: None, DOWN: None}
    assert separate == best


def test_candidates_are_found_once_and_tried_among_the_best_so_far() -> None:
    asked, measured = [], []

    def right(shape: GemmShape) -> Sequence[GemmConfig]:
        asked.append(shape)
        return WAYS

    def neighbours(configs: Configs) -> float:
        """Return times in which the second product is fast only next to the best first one."""
        measured.append(dict(configs))
        return (
            20.0
            - 5 * (configs[QKV] == WAYS[2])
            - (configs[DOWN] == WAYS[0]) * (9 if configs[QKV] == WAYS[2] else -9)
        )

    configs, _, best = fastest_in_turn([QKV, DOWN], right, neighbours)
    assert asked == [QKV, DOWN]
    assert configs == {QKV: WAYS[2], DOWN: WAYS[0]}
    assert best == 6.0
    assert len(measured) == 1 + ROUNDS * 2 * (len(WAYS) + 2 * len(WAYS))


def test_one_lucky_measurement_is_not_enough() -> None:
    calls = 0

    def lucky(_configs: Configs) -> float:
        nonlocal calls
        calls += 1
        return 1.0 if calls == 2 else 10.0  # the first candidate's first measurement

    configs, _, _ = fastest_in_turn([QKV], lambda _: WAYS, lucky)
    assert configs == {QKV: None}
