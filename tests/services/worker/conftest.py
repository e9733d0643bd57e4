"""Worker tests run on one thread, most with one small random checkpoint."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import PreTrainedModel, Qwen3ForCausalLM

from tests.models.checkpoints import save_checkpoint
from tests.services.worker.driver import generate


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


class Checkpoint(NamedTuple):
    """A random checkpoint."""

    folder: Path
    model: PreTrainedModel


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Small, with 8 heads, 4 KV heads and 264 tokens."""
    folder = tmp_path_factory.mktemp("checkpoint")
    return Checkpoint(folder, save_checkpoint(folder, tie_word_embeddings=True))


@pytest.fixture(scope="session")
def folder(checkpoint: Checkpoint) -> Path:
    """Return the folder of the checkpoint."""
    return checkpoint.folder


@pytest.fixture(scope="session")
def reference(checkpoint: Checkpoint) -> Qwen3ForCausalLM:
    """Return the checkpoint's model in transformers."""
    return checkpoint.model


@pytest.fixture(scope="session")
def plain(folder: Path) -> dict[int, list[int]]:
    """Return the tokens of `generate` where nobody asks."""
    return generate(folder, None).tokens
