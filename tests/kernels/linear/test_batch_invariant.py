"""Rows of products have the same bits alone and among others, in any shape and on any CPU."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels.linear import batch_invariant
from penstock.kernels.linear.batch_invariant import batched_product, pad_rows, product

ODD = [(5, 7), (5, 8), (65, 8), (64, 1), (320, 1), (8, 1), (513, 3), (1500, 65), (31, 33)]
"""inner dimension and columns; MKL adds up most of them in an order that depends on the rows"""
TWO_THREADS = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
"""which sleep between calls: on a busy machine, threads that spin wait for each other's core"""
CPUS = [
    {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default"},
    {"MKL_CBWR": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2", **TWO_THREADS},
]
"""environments in which libraries take the CPU for another"""


def rows_agree(inner: int, num_columns: int, counts: list[int], most: int = 70) -> None:
    """Compare rows alone, and in the middle of others, with all of them together."""
    x, weight = torch.randn(most, inner), torch.randn(num_columns, inner)
    together = product(x, weight)
    for count in counts:
        for begin in {0, min(3, most - count), most - count}:
            rows = slice(begin, begin + count)
            assert torch.equal(product(x[rows], weight), together[rows]), (inner, num_columns, rows)


@settings(max_examples=150)
@given(st.integers(1, 1100), st.integers(1, 70), st.integers(1, 70))
def test_rows_do_not_depend_on_their_number(inner: int, num_columns: int, num_rows: int) -> None:
    rows_agree(inner, num_columns, [1, num_rows])


@pytest.mark.parametrize(("inner", "num_columns"), ODD)
def test_odd_shapes(inner: int, num_columns: int) -> None:
    rows_agree(inner, num_columns, list(range(1, 65)))


def test_rows_of_several_calls() -> None:
    rows_agree(600, 48, [1, 16, 255, 256, 257, 512], most=700)


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_rows_of_batches(head_dim: int) -> None:
    batches_agree(head_dim, most=256)


def batches_agree(head_dim: int, most: int) -> None:
    """Compare rows of the products of attention alone with those of all rows together."""
    x, keys, values = (torch.randn(4, size, head_dim) for size in (most, 128, 128))
    together = both_products(x, keys, values)
    expected = (x.double() @ keys.double().mT) @ values.double()
    torch.testing.assert_close(together.double(), expected, atol=5e-2, rtol=1e-3)
    for num_rows in (1, 2, 7, 8, 9, 17, 37):
        some = both_products(x[:, 3 : 3 + num_rows], keys, values)
        assert torch.equal(some, together[:, 3 : 3 + num_rows]), num_rows


def both_products(x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return the products of attention, without the softmax between."""
    num_rows = x.shape[1]
    x = pad_rows(x, 8)
    scores = x.new_empty(len(x), x.shape[1], keys.shape[1])
    batched_product(x, keys.mT, scores)
    out = torch.zeros_like(x)
    batched_product(scores, values, out, add=True)
    return out[:, :num_rows]


@pytest.mark.long
def test_on_other_cpus() -> None:
    """In parallel, each in a process: libraries look at the CPU once."""
    running = [
        subprocess.Popen(
            [sys.executable, "-P", __file__],
            env={"OMP_NUM_THREADS": "1"} | os.environ | cpu,
            stderr=subprocess.PIPE,
            text=True,
        )
        for cpu in CPUS
    ]
    try:
        for cpu, process in zip(CPUS, running, strict=True):
            _, errors = process.communicate()
            assert process.returncode == 0, f"{cpu}: {errors}"
    finally:
        for process in running:
            process.kill()


@pytest.fixture
def _forget_the_check() -> Iterator[None]:
    batch_invariant._rows_of_call.cache_clear()
    yield
    batch_invariant._rows_of_call.cache_clear()


@pytest.mark.usefixtures("_forget_the_check")
@pytest.mark.parametrize(("calls", "expected"), [("few", 16), ("none", 1)])
def test_a_library_that_fails_the_check(
    calls: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A BLAS whose bits depend on the number of rows, and one whose bits depend on the place."""
    mm, addmm_ = torch.mm, Tensor.addmm_

    def disturb(out: Tensor) -> Tensor:
        if calls == "few":
            return out.mul_(1 + len(out) / 2**20)
        return out.mul_(1 + torch.arange(len(out))[:, None] / 2**20)

    monkeypatch.setattr(torch, "mm", lambda x, y: disturb(mm(x, y)))
    monkeypatch.setattr(
        Tensor, "addmm_", lambda out, x, y, beta: disturb(addmm_(out, x, y, beta=beta))
    )
    assert batch_invariant._rows_of_call(1) == expected
    for inner, num_columns in [(64, 48), (600, 8)]:
        rows_agree(inner, num_columns, [1, 2, 17, 64])
    batches_agree(64, most=40)


def main() -> None:
    """Compare rows in many shapes."""
    for inner in (5, 8, 16, 31, 64, 65, 256, 320, 513, 768):
        for num_columns in (1, 2, 5, 7, 8, 15, 16, 17, 33, 48, 64):
            rows_agree(inner, num_columns, [1, 2, 7, 15, 16, 17, 31, 32, 64])
    for head_dim in (16, 64, 128):
        batches_agree(head_dim, most=256)


if __name__ == "__main__":
    main()
