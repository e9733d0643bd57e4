"""Tokens on their way to all ranks."""

from types import SimpleNamespace
from typing import Any

import torch

from penstock.services.worker.model_runner import Sampler


def test_a_row_without_a_token_leaves_one_that_the_model_can_read() -> None:
    tp = SimpleNamespace(size=2, shares_memory=False, broadcast=lambda tokens: tokens)
    slots: Any = SimpleNamespace(last_token=torch.full((3,), 9))
    model: Any = SimpleNamespace(tp=tp)
    state: Any = None
    Sampler(model, slots, state, 2, 10).share(torch.tensor([-1, 5]), torch.tensor([1, 0]))
    assert slots.last_token.tolist() == [5, 0, 9]
