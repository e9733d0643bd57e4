"""Checkpoints of integers on a CPU: what a worker keeps packed."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.kernels.cpu import compiled_layers
from penstock.kernels.packed.matrices import Integers
from penstock.models.model import Model
from penstock.protocol.checkpoint import ModelError
from penstock.protocol.config import Config
from penstock.protocol.messages.worker import WorkerAssignment
from penstock.services.worker import cuda_graphs
from penstock.services.worker.loading import load
from tests.models.checkpoints import save_checkpoint
from tests.models.stored_formats import awq, quantize_checkpoint


def loaded_model(folder: Path, **options: object) -> Model:
    config = Config(device="cpu", model=str(folder), **options)  # type: ignore[arg-type]
    return load(config, WorkerAssignment(1, "g", 0, 1, ""), lambda: None)._model


@pytest.fixture
def awq_model(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path, hidden_size=128, intermediate_size=192)
    quantize_checkpoint(tmp_path, awq(64))
    return tmp_path


def test_integers_stay_and_the_head_becomes_such(
    awq_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded_model(awq_model, quantize_lm_head=True)
    assert isinstance(model.model.layers[0].self_attn.qkv_proj.weight, Integers)
    assert model.compiled is not None
    assert isinstance(model.compiled._head, Integers)  # type: ignore[attr-defined]
    assert "dequantized" not in caplog.text


@pytest.mark.parametrize(
    ("options", "is_compiled"), [({"attention": "torch"}, False), ({"dtype": "float32"}, True)]
)
def test_integers_are_dequantized(
    awq_model: Path,
    options: dict[str, str],
    is_compiled: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = loaded_model(awq_model, **options)
    assert isinstance(model.model.layers[0].self_attn.qkv_proj.weight, Tensor)
    assert (model.compiled is not None) == is_compiled
    assert "14 of 25 weights are dequantized, such as model.layers.0.self_attn" in caplog.text


def test_integers_are_not_made_again(awq_model: Path) -> None:
    with pytest.raises(ModelError, match="--quantization int8: weights in 4-bit AWQ"):
        loaded_model(awq_model, quantization="int8")


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_failed_compilation_leaves_the_weights_to_torch(
    awq_model: Path, monkeypatch: pytest.MonkeyPatch, is_packed: bool
) -> None:
    """Packed ones, and those of the demo model in bfloat16."""

    def fail(*_: object) -> None:
        raise RuntimeError("LLVM knows no such CPU")

    monkeypatch.setattr(compiled_layers, "load", fail)
    model = loaded_model(awq_model if is_packed else Config().model_folder)
    assert model.compiled is None
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_packed_weights_have_the_graphs_of_their_numbers(
    awq_model: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step computes with all numbers of a word, so that it takes as long with fewer tokens."""
    wide = tmp_path_factory.mktemp("wide")
    save_checkpoint(wide, hidden_size=128, intermediate_size=192)
    models = loaded_model(awq_model), loaded_model(wide)
    num_weights = sum(weight.numel() for weight in models[1].model.layers.parameters())
    monkeypatch.setattr(cuda_graphs, "LAUNCH_FLOPS", 2 * 1000 * num_weights)
    shapes = []
    for model in models:
        monkeypatch.setattr(model.attention, "can_be_captured", True)
        monkeypatch.setattr(model.attention, "can_capture_prefill", True)
        shapes.append(cuda_graphs.graph_shapes(Config(), model, 1000))
    assert shapes[0] == shapes[1]
    assert max(shape.num_tokens for shape in shapes[1]) == 896
