"""Tensor parallelism: the logits of one rank, from processes joined by gloo or shared memory."""

import atexit
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, local

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from penstock.models.architecture import Axis, rows
from penstock.models.parallel import RowParallelLinear
from penstock.models.tensor_parallel import TensorParallel
from tests.models.checkpoints import EXPERTS, save_checkpoint
from tests.models.forward import load_model, prefill_logits, random_prompts
from tests.models.hybrid import EXPERTS as HYBRID_EXPERTS
from tests.models.hybrid import save_hybrid

ROOT = Path(__file__).parents[2]
SHAPES = {
    "untied": {"tie_word_embeddings": False},
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 8},
    "odd": {"vocab_size": 333},
    "few-kv-heads": {"num_key_value_heads": 2},
    "experts": EXPERTS,
    "odd-tied": {"vocab_size": 1001, "tie_word_embeddings": True, "head_dim": 32},
}
HYBRIDS = {
    "Qwen3.5": {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_key_value_heads": 1},
    "Qwen3.5-experts": {"linear_num_key_heads": 4, **HYBRID_EXPERTS},
    "Qwen3-Next": {
        "family": "Next",
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        **HYBRID_EXPERTS,
    },
}


def free_rendezvous() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_logits_are_those_of_one_rank(tmp_path: Path, size: int) -> None:
    shapes = SHAPES | HYBRIDS
    folders = [str(tmp_path / name) for name in shapes]
    for folder, (name, shape) in zip(folders, shapes.items(), strict=True):
        (save_hybrid if name in HYBRIDS else save_checkpoint)(Path(folder), **shape)
    rendezvous, out = free_rendezvous(), str(tmp_path / "logits")
    command = [sys.executable, "-m", "tests.models.tp_rank"]
    ranks = [
        subprocess.Popen([*command, str(rank), str(size), rendezvous, out, *folders], cwd=ROOT)
        for rank in range(size)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0] * size
    logits = load_file(out)
    for folder, shape in zip(folders, shapes.values(), strict=True):
        prompts = random_prompts(shape.get("vocab_size", 264), 1, 30, 140)
        expected = prefill_logits(load_model(Path(folder)), prompts)
        for name in (folder, f"{folder}-ep") if "num_experts" in shape else (folder,):
            torch.testing.assert_close(logits[name], expected, atol=1e-4, rtol=0.0)
        assert torch.equal(logits[f"{folder}-shared"], logits[folder])


def test_the_residual_is_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 + 4 * 0.9 is 260 in bfloat16; 256 + 0.9, as a rank's part, is 256."""
    parts: list[Tensor] = []
    monkeypatch.setattr(TensorParallel, "all_gather", lambda _, x: [*map(torch.clone, parts), x])
    residual, x = torch.full((2, 8), 256.0).bfloat16(), torch.ones(2, 4).bfloat16()
    for rank in range(4):
        layer = RowParallelLinear(TensorParallel(rank, 4), [rows("o", 8, Axis("", 16), "")])
        layer.weight = nn.Parameter(torch.full((8, 4), 0.225).bfloat16(), False)
        out = layer(x, residual)
        parts.append(torch.full((2, 8), 0.9).bfloat16())
    assert (out == 260).all()
    assert (residual == 256).all()


def test_alone_nothing_is_exchanged() -> None:
    tp, x = TensorParallel.join("", 0, 1), torch.randn(3)
    assert tp.all_reduce(x) is x
    assert tp.gather(x) is x
    assert tp.broadcast(x) is x


class Ranks:
    """The ranks of a group as threads, and what they bring together; which GPUs reach which."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cut: set[tuple[int, int]]) -> None:
        self.cut = cut
        self.asked: set[tuple[int, int]] = set()
        self._meet, self._rank, self._brought = Barrier(4), local(), [None] * 4
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", self._reaches)
        monkeypatch.setattr(dist, "all_gather_object", self._gather)
        monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
        monkeypatch.setattr(atexit, "register", lambda _: None)

    def join(self, rank: int) -> TensorParallel:
        self._rank.own = rank
        return TensorParallel.join("", rank, 4, torch.device("cuda", rank))

    def _reaches(self, device: int, other: int) -> bool:
        self.asked.add((device, other))
        return (device, other) not in self.cut

    def _gather(self, objects: list[object], own: object) -> None:
        self._brought[self._rank.own] = own
        self._meet.wait(timeout=60)
        objects[:] = self._brought
        self._meet.wait(timeout=60)


@pytest.mark.parametrize("cut", [set(), {(3, 0)}, {(1, 2), (2, 1)}], ids=str)
def test_gpus_without_peer_access_go_by_nccl(
    monkeypatch: pytest.MonkeyPatch, cut: set[tuple[int, int]]
) -> None:
    """All ranks alike, also those that reach every other."""
    ranks = Ranks(monkeypatch, cut)
    with ThreadPoolExecutor(4) as threads:
        groups = list(threads.map(ranks.join, range(4)))
    assert [group.spans_nodes for group in groups] == [bool(cut)] * 4
    assert [group.shares_memory for group in groups] == [not cut] * 4
    assert ranks.asked == {(a, b) for a in range(4) for b in range(4) if a != b}
    for group in groups:
        if cut:
            group.reserve(1 << 20, torch.bfloat16)  # of no symmetric memory, which is not here
            assert group.empty(4, 4, torch.bfloat16) is None


def test_nodes_are_not_asked_for_peer_access(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, set())
    group = TensorParallel.join("", 0, 4, torch.device("cuda", 0), spans_nodes=True)
    assert group.spans_nodes
    assert not ranks.asked
