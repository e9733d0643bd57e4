"""What a worker decides before it runs."""

from pathlib import Path

import pytest
import torch

from penstock.protocol.checkpoint import ModelError
from penstock.protocol.config import Config
from penstock.protocol.messages import WorkerAssignment
from penstock.services.worker.cuda_graphs import graph_sizes
from penstock.services.worker.loading import choose_device, load, worst_case_plan
from penstock.services.worker.persistent_batch import PersistentBatch


@pytest.mark.parametrize(
    ("wanted", "num_gpus", "tp_size", "device"),
    [
        ("auto", 0, 1, "cpu"),
        ("auto", 1, 1, "cuda:0"),
        ("auto", 2, 2, "cpu"),
        ("cpu", 8, 1, "cpu"),
        ("cuda", 4, 2, "cuda:1"),
    ],
)
def test_the_device_of_the_last_rank(
    monkeypatch: pytest.MonkeyPatch, wanted: str, num_gpus: int, tp_size: int, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    assert str(choose_device(wanted, tp_size - 1, tp_size)) == device


def test_too_few_gpus_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ModelError, match="--tp 2 needs as many GPUs; this machine has 1"):
        choose_device("cuda", 0, 2)


def test_a_back_end_that_can_not_be_had_is_told(folder: Path) -> None:
    config = Config(model=str(folder), device="cpu", attention="triton")
    with pytest.raises(ModelError, match="attention 'triton' needs a GPU"):
        load(config, WorkerAssignment(1, "group", 0, 1, ""), lambda: None)


def test_graphs_are_of_every_size_that_the_design_names() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(30) == [1, 2, 4, 8, 16, 24, 30]
    assert graph_sizes(256) == [1, 2, 4, *range(8, 257, 8)]
    assert graph_sizes(300) == [1, 2, 4, *range(8, 257, 8), 272, 288, 300]


@pytest.mark.parametrize(("max_tokens", "max_seqs"), [(64, 8), (10, 64), (100, 7)])
def test_the_worst_case_is_a_full_step(max_tokens: int, max_seqs: int) -> None:
    config = Config(max_num_batched_tokens=max_tokens, max_num_seqs=max_seqs)
    plan = worst_case_plan(config, 200, 16)
    batch = PersistentBatch(max_seqs, 20, 16, 1, 50)
    batch.apply(plan)
    rows = batch.advance(plan.chunks)
    assert rows is not None
    assert (rows.num_tokens, len(rows.sampled)) == (max_tokens, min(max_seqs, max_tokens))
