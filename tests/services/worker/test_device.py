"""The type in which a model computes, by option, checkpoint and device."""

from types import SimpleNamespace

import msgspec
import pytest
import torch

from penstock.protocol.checkpoint import ModelError, read_model_config
from penstock.protocol.config import Config
from penstock.services.worker.hardware import check_capability, compute_dtype

MODEL = read_model_config(Config().model_folder)
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("wanted", "own", "device", "dtype"),
    [
        ("auto", "bfloat16", GPU, torch.bfloat16),
        ("auto", "float16", GPU, torch.float16),
        ("auto", "float32", GPU, torch.bfloat16),
        ("bfloat16", "float16", GPU, torch.bfloat16),
        ("float16", "bfloat16", GPU, torch.float16),
        ("auto", "float16", CPU, torch.float32),
        ("float32", "bfloat16", CPU, torch.float32),
    ],
)
def test_the_type(wanted: str, own: str, device: torch.device, dtype: torch.dtype) -> None:
    for names in ({"torch_dtype": own, "dtype": "auto"}, {"torch_dtype": "auto", "dtype": own}):
        model = msgspec.structs.replace(MODEL, **names)
        assert compute_dtype(model, wanted, device) == dtype


@pytest.mark.parametrize("wanted", ["float16", "bfloat16"])
def test_a_cpu_computes_in_float32_only(wanted: str) -> None:
    with pytest.raises(ModelError, match=f"--dtype: got {wanted} on a CPU, expected auto or fl"):
        compute_dtype(MODEL, wanted, CPU)


def test_a_gpu_computes_in_16_bits_only() -> None:
    sentence = "--dtype: got float32 on a GPU, expected auto, bfloat16 or float16"
    with pytest.raises(ModelError, match=sentence):
        compute_dtype(MODEL, "float32", GPU)


@pytest.mark.parametrize(
    ("name", "capability", "is_served"),
    [("Tesla V100", (7, 0), False), ("Tesla T4", (7, 5), False), ("NVIDIA A100", (8, 0), True)],
)
def test_old_gpus_are_refused_by_name(
    name: str, capability: tuple[int, int], is_served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(name=name, major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: found)
    check_capability(CPU)
    if is_served:
        check_capability(GPU)
        return
    version = "{}.{}".format(*capability)
    sentence = f"--device: got {name} of compute capability {version}, expected 8.0 or newer; --d"
    with pytest.raises(ModelError, match=sentence):
        check_capability(GPU)
