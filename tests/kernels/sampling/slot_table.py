"""Slot tables from columns."""

import torch
from torch import Tensor

from penstock.kernels.layouts.sampling import COLUMNS, SamplingTensors, column, make_parameters


def slot_table(*, last_token: Tensor, **columns: Tensor) -> SamplingTensors:
    """Return a slot table with the given columns; the others are neutral."""
    table = SamplingTensors(make_parameters(len(last_token), last_token.device), last_token)
    for name, kind in COLUMNS.items():
        column(table.parameters, name).copy_(columns.pop(name, torch.tensor(kind.neutral)))
    assert not columns
    return table
