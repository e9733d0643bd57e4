"""Type in which the model computes."""

import torch

from penstock.protocol.checkpoint import ModelConfig, ModelError


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
