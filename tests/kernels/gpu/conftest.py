"""The Triton kernels on a GPU, or without one in Triton's interpreter."""

from typing import Any

import pytest
import torch


@pytest.fixture
def device() -> str:
    """Where the tensors of a test lie."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def dtype(device: str) -> torch.dtype:
    """Of activations: the interpreter can't compute in bfloat16."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def on_gpu(*values: Any) -> Any:
    """A parameter that is run on a GPU only: the interpreter is slow, and other values go the same
    ways through the kernel."""
    return pytest.param(*values, marks=pytest.mark.gpu)
