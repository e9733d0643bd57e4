"""A row of a matrix product has the same bits whatever the other rows are."""

import pytest
import torch

from penstock.kernels.linear import linear

SHAPES = [(5, 7), (64, 333), (256, 1024), (768, 256), (1024, 300), (1500, 64)]
NUM_ROWS = [1, 2, 3, 7, 8, 15, 16, 17, 31, 64, 100, 129, 200]


@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_equals_the_product_in_float64(inner: int, outer: int) -> None:
    x, weight = torch.randn(20, inner), torch.randn(outer, inner)
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(linear(x, weight).double(), expected, atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_a_row_does_not_depend_on_the_number_of_rows(inner: int, outer: int) -> None:
    x, weight = torch.randn(400, inner), torch.randn(outer, inner)
    together = linear(x, weight)
    for num_rows in NUM_ROWS:
        for begin in (0, 13, 400 - num_rows):
            some = slice(begin, begin + num_rows)
            assert torch.equal(linear(x[some], weight), together[some]), f"{num_rows} rows"


def test_refuses_a_weight_for_other_features() -> None:
    with pytest.raises(ValueError, match=r"weight has shape \[3, 5\]; \[any, 4\] is needed"):
        linear(torch.zeros(2, 4), torch.zeros(3, 5))
