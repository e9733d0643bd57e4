"""Device of a worker, and the type in which the model computes there."""

import logging
import os

import torch

from penstock.protocol.checkpoint import ModelConfig, ModelError
from penstock.protocol.transport.discovery import NODE_VARIABLE

log = logging.getLogger(__name__)
# index of the worker's GPU among the GPUs that torch sees: all GPUs of the node, because the ranks
# need peer access
GPU_VARIABLE = "PENSTOCK_GPU"
OLDEST = 8, 0  # compute capability of the oldest GPUs that have bfloat16 and asynchronous copies


def choose_device(wanted: str, index: int, tp_size: int, num_replicas: int = 1) -> torch.device:
    """Return the GPU of the worker `index` among all replicas' workers, or the CPU.

    On a cluster GPU_VARIABLE has the GPU's index. Raises ModelError if GPUs are requested and the
    machine has too few.
    """
    given = os.environ.get(GPU_VARIABLE)
    if given is not None or NODE_VARIABLE in os.environ:
        return _given_device(wanted, given)
    num_gpus = torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and not num_gpus):
        return torch.device("cpu")
    if num_gpus < tp_size * num_replicas:
        of_replicas = f" with --dp {num_replicas}" if num_replicas > 1 else ""
        too_few = (
            f"--tp {tp_size}{of_replicas} needs {tp_size * num_replicas} GPUs; "
            f"this machine has {num_gpus}"
        )
        if wanted == "cuda":
            raise ModelError(too_few)
        log.warning("%s: the model runs on the CPU", too_few)
        return torch.device("cpu")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _given_device(wanted: str, given: str | None) -> torch.device:
    """Return the given device, without falling back to the CPU: other ranks may have GPUs."""
    if wanted == "cpu" or (wanted == "auto" and given is None):
        return torch.device("cpu")
    if given is None:
        raise ModelError(f"--device: got {wanted}, but the cluster assigned no GPU to this worker")
    num_gpus = torch.cuda.device_count()
    if int(given) >= num_gpus:
        raise ModelError(f"{GPU_VARIABLE}: got {given}, expected an index of {num_gpus} GPUs")
    torch.cuda.set_device(int(given))
    return torch.device("cuda", int(given))


def check_capability(device: torch.device) -> None:
    """Raise ModelError for a GPU that is too old."""
    if device.type == "cpu":
        return
    found = torch.cuda.get_device_properties(device)
    if (found.major, found.minor) < OLDEST:
        raise ModelError(
            f"--device: got {found.name} of compute capability {found.major}.{found.minor}, "
            "expected 8.0 or newer; --device cpu serves small models"
        )


def compute_dtype(model: ModelConfig, wanted: str, device: torch.device) -> torch.dtype:
    """Return the type for a model on this device; wanted: of `--dtype`. Raises ModelError."""
    if device.type == "cpu":
        if wanted not in ("auto", "float32"):
            raise ModelError(f"--dtype: got {wanted} on a CPU, expected auto or float32")
        return torch.float32
    if wanted == "float32":
        raise ModelError("--dtype: got float32 on a GPU, expected auto, bfloat16 or float16")
    chosen = model.own_dtype if wanted == "auto" else wanted
    return torch.float16 if chosen == "float16" else torch.bfloat16
