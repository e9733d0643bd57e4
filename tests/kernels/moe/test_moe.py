"""A mixture of experts: what it computes, what it refuses, and rows that stay as they are."""

import pytest
import torch
from torch import Tensor

from penstock.kernels.moe import norm_moe, route

EPS = 1e-6
HIDDEN, SIZE, EXPERTS = 48, 20, 10


def weights() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """norm_weight, router, gate_up, down."""
    return (
        torch.rand(HIDDEN) + 0.5,
        torch.randn(EXPERTS, HIDDEN) / 3,
        torch.randn(EXPERTS, 2 * SIZE, HIDDEN) / 7,
        torch.randn(EXPERTS, HIDDEN, SIZE) / 4,
    )


def moe(x: Tensor, operands: tuple[Tensor, ...], **options: object) -> Tensor:
    norm_weight, *rest = operands
    return norm_moe(x, norm_weight, EPS, *rest, **{"top_k": 3, "normalize": True, **options})  # type: ignore[arg-type]


def expected(x: Tensor, operands: tuple[Tensor, ...], experts: range, normalize: bool) -> Tensor:
    """Token by token in float64."""
    norm_weight, router, gate_up, down = (one.double() for one in operands)
    rows = []
    for row in x.double():
        normed = row / (row.square().mean() + EPS).sqrt() * norm_weight
        probabilities = (router @ normed).softmax(0)
        best = sorted(range(EXPERTS), key=lambda one: -probabilities[one])[:3]
        total = probabilities[best].sum() if normalize else 1.0
        result = torch.zeros(HIDDEN).double()
        for expert in set(best) & set(experts):
            gate, up = (gate_up[expert] @ normed).chunk(2)
            activated = torch.nn.functional.silu(gate) * up
            result += probabilities[expert] / total * (down[expert] @ activated)
        rows.append(result)
    return torch.stack(rows)


@pytest.mark.parametrize("normalize", [False, True])
def test_equals_the_sum_over_the_experts_in_float64(normalize: bool) -> None:
    x, operands = torch.randn(20, HIDDEN), weights()
    out = moe(x, operands, normalize=normalize)
    wanted = x + expected(x, operands, range(EXPERTS), normalize)
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)


def test_experts_elsewhere_count_as_zero() -> None:
    x, operands = torch.randn(20, HIDDEN), weights()
    here = (*operands[:2], operands[2][4:7], operands[3][4:7])
    out = torch.empty_like(x)
    assert moe(x, here, first_expert=4, add=False, out=out) is out
    wanted = expected(x, operands, range(4, 7), True)
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)


def test_a_row_does_not_depend_on_the_number_of_rows() -> None:
    x, operands = torch.randn(200, HIDDEN), weights()
    together = moe(x, operands)
    for num_rows in (1, 2, 7, 16, 31, 100):
        assert torch.equal(moe(x[50 : 50 + num_rows], operands), together[50 : 50 + num_rows])


def test_routes_to_the_most_probable() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 4.0, -1.0]])
    experts, probabilities = route(logits, 2, normalize=False)
    assert experts.tolist() == [[1, 2], [0, 1]]
    torch.testing.assert_close(probabilities, logits.softmax(-1).gather(1, experts))
    assert torch.allclose(route(logits, 2, normalize=True)[1].sum(-1), torch.ones(2))


def test_refuses_what_does_not_fit() -> None:
    x, operands = torch.randn(2, HIDDEN), weights()
    with pytest.raises(
        ValueError, match=r"gate_up: got shape \[10, 39, 48\], expected \[10, 40, 48\]"
    ):
        moe(x, (*operands[:2], operands[2][:, 1:], operands[3]))
    with pytest.raises(ValueError, match="top_k: got 11, expected 1 to 10, the number of experts"):
        moe(x, operands, top_k=11)
    with pytest.raises(ValueError, match="first_expert: got experts 3 to 12, expected 0 to 9"):
        moe(x, operands, first_expert=3)
