"""The Triton kernels on a GPU, or without one in Triton's interpreter."""

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
