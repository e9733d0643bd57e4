"""A mixture of experts: rows that stay as they are, and what it refuses.

What it computes is compared with `transformers` in tests/models.
"""

import pytest
import torch
from torch import Tensor

from penstock.kernels.elementwise import rms_norm
from penstock.kernels.moe import norm_moe

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


def test_a_row_does_not_depend_on_the_number_of_rows() -> None:
    x, operands = torch.randn(200, HIDDEN), weights()
    together = moe(x, operands)
    for num_rows in (1, 2, 7, 16, 31, 100):
        assert torch.equal(moe(x[50 : 50 + num_rows], operands), together[50 : 50 + num_rows])


def test_all_tokens_have_the_shared_expert() -> None:
    x, (norm_weight, *rest) = torch.randn(9, HIDDEN), weights()
    plain = moe(x, (norm_weight, *(one[:-1] for one in rest)), normalize=False)
    normed = rms_norm(x, norm_weight, EPS)
    router, gate_up, down = (one[-1] for one in rest)
    gate, up = (normed @ gate_up.T).chunk(2, 1)
    output = (torch.nn.functional.silu(gate) * up) @ down.T
    expected = plain + torch.sigmoid(normed @ router)[:, None] * output
    torch.testing.assert_close(moe(x, (norm_weight, *rest), shared=True, normalize=False), expected)


def test_refuses_what_does_not_fit() -> None:
    x, operands = torch.randn(2, HIDDEN), weights()
    with pytest.raises(
        ValueError, match=r"gate_up: got shape \[10, 39, 48\], expected \[10, 40, 48\]"
    ):
        moe(x, (*operands[:2], operands[2][:, 1:], operands[3]))
    with pytest.raises(ValueError, match="top_k: got 11, expected 1 to 10, the number of experts"):
        moe(x, operands, top_k=11)
    with pytest.raises(ValueError, match="top_k: got 10, expected 1 to 9, the number of experts"):
        moe(x, operands, top_k=10, shared=True)
    with pytest.raises(ValueError, match="first_expert: got experts 3 to 12, expected 0 to 9"):
        moe(x, operands, first_expert=3)
