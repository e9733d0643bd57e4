"""Names of architectures and formats of weights that are not served, and what to use instead."""

import re
from collections.abc import Collection, Iterable
from pathlib import Path

_QUANTIZED_NAME = re.compile(
    r"(Qwen3-[\w.-]*?)-(?:AWQ|GPTQ|GGUF|MLX|Int[48]|W\dA\d|[48]-?bit)", re.I
)


def architecture_hint(architectures: Iterable[str]) -> str:
    """Return what a model is for, to be appended to a sentence; empty where that is not known.

    architectures: those of config.json, and its `model_type`.
    """
    names = " ".join(architectures)
    if re.search(r"qwen3_?next|qwen3_5|qwen4", names, re.I):
        return (
            "; models with linear attention (Qwen3-Next, Qwen3.5, 3.6 and 3.8, Qwen4) are not "
            "served yet: give one of Qwen3, such as Qwen/Qwen3-Coder-30B-A3B-Instruct"
        )
    if re.search(r"Classification|Reward|Guard|Qwen3\w*Model\b", names):
        return "; a classifier, or an embedding model without modules.json, is not served"
    if "ForConditionalGeneration" in names:
        return (
            "; a model of images or audio is not supported: give one of text, such as Qwen/Qwen3-8B"
        )
    if re.search(r"qwen2|qwen\b|QWenLM", names, re.I):
        return "; Qwen2.5 and older ones are not served: give one of Qwen3, such as Qwen/Qwen3-8B"
    return ""


def served_instead(folder: Path) -> str:
    """Return what to give in place of a checkpoint whose format of weights is not served."""
    if found := _QUANTIZED_NAME.search(str(folder)):
        return f"give Qwen/{found[1]}-FP8, or Qwen/{found[1]} with --quantization fp8"
    return "give the model's FP8 checkpoint, or the 16-bit one with --quantization fp8"


def without_config(name: str, files: Collection[str]) -> str:
    """Return why files without a `config.json` are not served; name: of the folder or file."""
    if name.lower().endswith(".gguf"):
        return f"{name}: got a GGUF file, which `launch all --model` converts, expected a folder"
    if found := sorted(file for file in files if file.lower().endswith(".gguf")):
        return (
            f"{name}: got GGUF files, expected config.json and safetensors; give the path of one "
            f"file on this machine, such as {found[0]}"
        )
    if "adapter_config.json" in files:
        return f"{name}: got a LoRA adapter, expected a model; merge both with `merge_and_unload`"
    return f"{name} has no config.json; a checkpoint needs it"
