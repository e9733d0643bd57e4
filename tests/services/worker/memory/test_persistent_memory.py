"""Weights and KV cache that the next worker of a rank maps, with real descriptors."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from penstock.models.model import Model
from penstock.models.parallel import parameter, without_memory
from penstock.protocol.checkpoint import ModelError
from penstock.protocol.config import Config
from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.plan import BatchPlan, RowAdded
from penstock.protocol.messages.worker import WorkerAssignment
from penstock.protocol.transport.socket_pairs import MemoryClient, Taken
from penstock.services.worker import loading
from penstock.services.worker.loading import load
from penstock.services.worker.memory import persistent_memory
from penstock.services.worker.memory.persistent_memory import SharedMemoryError
from penstock.services.worker.model_runner import ModelRunner
from tests.models.checkpoints import save_checkpoint
from tests.models.hybrid import add_mtp, save_hybrid
from tests.models.stored_formats import awq, gptq, quantize_checkpoint

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")


class Keeper(MemoryClient):
    """A client and its supervisor in one."""

    def __init__(self) -> None:
        self.kept: dict[str, Taken] = {}
        self.num_shared = 0

    def take(self, name: str, *, shares: bool = False) -> Taken | None:
        self.num_shared += shares
        taken = self.kept.get(name)
        return taken and taken._replace(descriptor=os.dup(taken.descriptor))

    def keep(self, name: str, manifest: bytes, descriptor: int) -> None:
        self.kept[name] = Taken(manifest, os.dup(descriptor))

    def drop(self, name: str = "") -> None:
        if taken := self.kept.pop(name, None):
            os.close(taken.descriptor)


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Keeper:
    one = Keeper()
    monkeypatch.setattr(MemoryClient, "from_environment", lambda: one)
    return one


@pytest.fixture
def fills(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of checkpoints' folders that were read."""
    found: list[str] = []
    read = persistent_memory.load_model

    def count(memory: object, config: Config, make: object, fill: Callable[[Model], None]) -> Model:
        def fill_and_count(model: Model) -> None:
            found.append(config.model_folder.name)
            fill(model)

        return read(memory, config, make, fill_and_count)  # type: ignore[arg-type]

    monkeypatch.setattr("penstock.services.worker.loading.load_model", count)
    return found


def start(
    folder: Path,
    num_blocks: int = 0,
    *,
    standby: bool = False,
    in_blocks: int = 9,
    **options: object,
) -> ModelRunner:
    """Start a worker. num_blocks: of the last one. in_blocks: `--num-blocks`."""
    config = Config(model=str(folder), device="cpu", num_threads=1, num_blocks=in_blocks)
    config = replace(config, **options)
    place = WorkerAssignment(1, "g", 0, 1, "", num_blocks, standby=standby)
    return load(config, place, lambda: None)


def tokens(runner: ModelRunner, num_computed: int = 0) -> list[int]:
    """Return the tokens after a prompt of 40, of which the KV of `num_computed` is there."""
    runner.clear()
    row = RowAdded(0, pack(range(40)), pack([3, 1, 4]), num_computed)
    plan = BatchPlan(1, 0, added=[row], chunks=pack([0, 40 - num_computed]))
    first = runner.launch(plan).token_ids()
    return first + [runner.launch(BatchPlan(1, n)).token_ids()[0] for n in range(1, 4)]


@pytest.mark.parametrize("attention", ["auto", "torch"])
@pytest.mark.parametrize("quantization", [None, awq(64), gptq()], ids=["16", "awq", "gptq"])
def test_the_next_worker_has_weights_and_kv(
    tmp_path: Path,
    folder: Path,
    keeper: Keeper,
    fills: list[str],
    attention: str,
    quantization: dict[str, Any] | None,
) -> None:
    if quantization:
        folder = tmp_path / "packed"
        save_checkpoint(folder, hidden_size=128, intermediate_size=192)
        quantize_checkpoint(folder, quantization)
    first = start(folder, attention=attention)
    expected = tokens(first)
    number = first.memory_id
    del first
    second = start(folder, 9, attention=attention)
    assert len(fills) == 1
    assert second.memory_id == number > 0
    assert tokens(second, num_computed=39) == expected
    assert sorted(keeper.kept) == ["kv.0.0", "weights.0.0"]


def test_what_was_loaded_in_part_is_not_kept(
    folder: Path, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ModelError("killed while it loads")

    monkeypatch.setattr("penstock.services.worker.loading.load_weights", fail)
    with pytest.raises(ModelError):
        start(folder)
    assert keeper.kept == {}


@pytest.mark.usefixtures("keeper")
@pytest.mark.parametrize("method", ["none", "mtp"])
def test_the_largest_steps_of_a_model_with_states_can_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The code that measures a GPU's memory runs here, with a given number of free bytes."""
    held: list[int] = []
    make_zeros = loading.zeros

    def zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
        held.append(num_bytes)
        return make_zeros(num_bytes, device)

    def measure(
        worst_cases: list[Callable[[], object]], *_: object, trial_bytes: int, **__: object
    ) -> int:
        assert held == [trial_bytes]
        for worst_case in worst_cases:
            worst_case()
        return 1 << 22

    add_mtp(tmp_path, save_hybrid(tmp_path))
    monkeypatch.setattr(loading, "_kv_bytes", loading._free_bytes)
    monkeypatch.setattr(loading, "free_gpu_bytes", measure)
    monkeypatch.setattr(loading, "zeros", zeros)
    runner = start(tmp_path, in_blocks=0, speculative_method=method)
    place_bytes = sum(tensor.nbytes for tensor in runner.kv.tensors) // (
        runner.num_state_blocks + 1
    )
    assert runner.num_state_blocks == (1 << 22) // (place_bytes + 8) - 1


@pytest.mark.usefixtures("keeper")
def test_memory_with_states_is_as_large_as_before(tmp_path: Path) -> None:
    save_hybrid(tmp_path)
    first = start(tmp_path, num_blocks=0, in_blocks=0, kv_cache_gib=0.001)
    sizes = first.num_blocks, first.num_state_blocks, first.blocks_per_state
    assert sizes[0] == sizes[1] * sizes[2] > 0
    number = first.memory_id
    del first
    again = start(tmp_path, sizes[0], in_blocks=0, kv_cache_gib=0.001)
    assert again.memory_id == number
    assert (again.num_blocks, again.num_state_blocks, again.blocks_per_state) == sizes
    del again
    other = start(tmp_path, sizes[0] + sizes[2], in_blocks=0, kv_cache_gib=0.001)
    assert other.memory_id != number
    assert other.num_state_blocks == sizes[1] + 1


@pytest.mark.parametrize(
    "change", ["checkpoint", "configuration", "more blocks", "torn descriptor"]
)
def test_what_does_not_fit_is_made_again(
    folder: Path, keeper: Keeper, fills: list[str], change: str, tmp_path: Path
) -> None:
    copy = tmp_path / "model"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    first = start(copy)
    expected, options, num_blocks = tokens(first), {}, 9
    match change:
        case "checkpoint":
            weights = copy / "model.safetensors"
            before = weights.stat()
            weights.write_bytes(weights.read_bytes())
            os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))  # as rsync and cp -p do
        case "configuration":
            options = {"max_num_seqs": 7}
        case "more blocks":
            num_blocks = 10
        case _:
            os.ftruncate(keeper.kept["weights.0.0"].descriptor, 0)
            os.ftruncate(keeper.kept["kv.0.0"].descriptor, 0)
    second = start(copy, num_blocks, **options)
    assert second.memory_id != first.memory_id
    assert len(fills) == 1 + (change != "more blocks")
    assert tokens(second) == expected


def test_a_platform_without_such_memory(
    folder: Path, keeper: Keeper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("not here")

    expected = tokens(start(folder))
    keeper.kept.clear()
    monkeypatch.setattr(persistent_memory, "_allocate", refuse)
    runner = start(folder)
    assert runner.memory_id == 0
    assert tokens(runner) == expected
    assert caplog.messages.count("memory ends with the worker: not here") == 1


def test_parameters_without_memory_take_none() -> None:
    with without_memory():
        one = parameter(1 << 20, 1 << 20)
    assert one.untyped_storage().nbytes() <= torch.float32.itemsize


def test_a_standby_worker_shares_memory_that_it_takes_over(
    folder: Path, keeper: Keeper, fills: list[str]
) -> None:
    first = start(folder)
    standby = start(folder, standby=True)
    assert (keeper.num_shared, len(fills)) == (2, 1)
    assert standby.memory_id == first.memory_id > 0
    expected = tokens(first)  # after the standby worker has loaded
    del first
    standby.take_over()
    assert keeper.num_shared == 2
    assert tokens(standby, num_computed=39) == expected


def test_a_standby_worker_makes_no_memory_and_drops_none(
    folder: Path, keeper: Keeper, fills: list[str]
) -> None:
    with pytest.raises(SharedMemoryError, match="weights"):
        start(folder, standby=True)
    assert (keeper.kept, fills) == ({}, [])
    start(folder)
    before = dict(keeper.kept)
    with pytest.raises(SharedMemoryError, match="weights"):
        start(folder, standby=True, max_model_len=64)  # another manifest
    kv = keeper.kept.pop("kv.0.0")
    with pytest.raises(SharedMemoryError, match="kv"):
        start(folder, standby=True)
    keeper.kept["kv.0.0"] = kv
    assert (keeper.kept, len(fills)) == (before, 1)
    with pytest.raises(SharedMemoryError, match="weights"):
        start(folder, standby=True, quantization="int8")  # its weights end with the worker
    assert keeper.kept == before


@pytest.mark.parametrize("kind", ["weights.0.0", "kv.0.0"])
@pytest.mark.parametrize("successor", [None, b""])
def test_memory_that_was_dropped_or_replaced_is_not_taken_over(
    folder: Path, keeper: Keeper, kind: str, successor: bytes | None
) -> None:
    """After a crash of the worker that ran, for example."""
    start(folder)
    standby = start(folder, standby=True)
    keeper.drop(kind)
    if successor is not None:
        start(folder)
    with pytest.raises(SharedMemoryError):
        standby.take_over()
