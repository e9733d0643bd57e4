"""Tensor parallelism: the logits of one rank, from real groups of processes joined by gloo."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from penstock.models.tensor_parallel import TensorParallel
from tests.models.checkpoints import EXPERTS, save_checkpoint
from tests.models.forward import load_model, prefill_logits, random_prompts

ROOT = Path(__file__).parents[2]
SHAPES = {
    "untied": {"tie_word_embeddings": False},
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 8},
    "odd": {"vocab_size": 333},
    "few-kv-heads": {"num_key_value_heads": 2},
    "experts": EXPERTS,
    "odd-tied": {"vocab_size": 1001, "tie_word_embeddings": True, "head_dim": 32},
}


def free_rendezvous() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.parametrize("size", [2, 4])
def test_logits_are_those_of_one_rank(tmp_path: Path, size: int) -> None:
    folders = [str(tmp_path / name) for name in SHAPES]
    for folder, shape in zip(folders, SHAPES.values(), strict=True):
        save_checkpoint(Path(folder), **shape)
    rendezvous, out = free_rendezvous(), str(tmp_path / "logits")
    command = [sys.executable, "-m", "tests.models.tp_rank"]
    ranks = [
        subprocess.Popen([*command, str(rank), str(size), rendezvous, out, *folders], cwd=ROOT)
        for rank in range(size)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0] * size
    logits = load_file(out)
    for folder, shape in zip(folders, SHAPES.values(), strict=True):
        prompts = random_prompts(shape.get("vocab_size", 264), 1, 30, 140)
        expected = prefill_logits(load_model(Path(folder)), prompts)
        for name in (folder, f"{folder}-ep") if "num_experts" in shape else (folder,):
            torch.testing.assert_close(logits[name], expected, atol=1e-4, rtol=0.0)


def test_alone_nothing_is_exchanged() -> None:
    tp, x = TensorParallel.join("", 0, 1), torch.randn(3)
    assert tp.all_reduce(x) is x
    assert tp.gather(x) is x
    assert tp.broadcast(x) is x
