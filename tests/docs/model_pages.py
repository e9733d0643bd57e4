"""Reference pages of models: which are served, and on which GPUs they fit."""

import msgspec

from penstock.launch.extras.models import CONTEXT, Layout, needs
from penstock.models.architecture import describe
from penstock.protocol.checkpoint import ModelConfig, ModelError, quantized, text_fields
from penstock.protocol.config import Config
from tests.docs.markdown import page, table
from tests.models.published import PUBLISHED

GPUS = {
    # MiB that nvidia-smi reports
    "A10, RTX 3090": 23_028,
    "L4, RTX 4090": 23_034,
    "RTX 5090": 32_607,
    "A100 40 GB": 40_960,
    "L40S": 46_068,
    "A100 80 GB": 81_920,
    "H100": 81_559,
    "H200": 143_771,
    "B200": 183_359,
}
MODELS = (
    *("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B"),
    *("Qwen3-30B-A3B", "Qwen3-235B-A22B", "Qwen3-Coder-480B-A35B-Instruct"),
    *("Qwen3.5-4B", "Qwen3.5-9B", "Qwen3.8-27B", "Qwen3.6-35B-A3B", "Qwen3-Coder-Next"),
)
GENERATIONS = (
    "Qwen3, also 2507, Coder, Embedding, Reranker and Guard-Gen | yes",
    "Qwen3.5, Qwen3.6, Qwen3.8 | yes, their text part",
    "Qwen3-Next, Qwen3-Coder-Next | yes",
    "Qwen4 (`qwen4_exp`) | not yet: sparse attention",
    "Qwen3-VL, Qwen3-Omni | no: they take images or audio",
    "Qwen2.5 and older, QwQ | no",
)


def config_of(name: str) -> ModelConfig:
    """Return the configuration of a published model, as it is read from `config.json`."""
    given = text_fields(PUBLISHED[name].config)
    given = {key: value for key, value in given.items() if value is not None}
    return msgspec.convert(given, ModelConfig)


def models() -> str:
    """Return the page of published checkpoints."""
    served = [
        f"{_link(name)} | {config_of(name).format_name or 'bfloat16'} | {one.note}"
        for name, one in PUBLISHED.items()
        if not one.refusal
    ]
    refused = [f"{name} | {_why(one.refusal)}" for name, one in PUBLISHED.items() if one.refusal]
    return page(
        "Models",
        "Published checkpoints of the Qwen3 family. A test writes each of them with its published "
        "`config.json`, shrunken sizes and random weights. What is served gives the greedy tokens "
        "of `transformers` on a CPU, and its logits within 1e-4 (fp8: 1e-3), against dequantized "
        "weights, with `--dtype float32` where these are integers. Integers that stay packed on a "
        "CPU give logits within 4 % of these (norms of two layers). What is not "
        "served is refused at the start, before its weights are downloaded.",
        "## Generations",
        table("generation | served", GENERATIONS),
        "## Served",
        table("checkpoint | weights | note", served),
        "## Refused",
        table("checkpoint | reason", refused),
    )


def memory() -> str:
    """Return the page of the memory that models need, and of GPUs on which they fit."""
    sizes = []
    for name in MODELS:
        model = config_of(name)
        weights = [needs(quantized(model, one), Layout()).weights for one in ("none", "fp8")]
        cells = [name, *map(_gib, weights)]
        state = needs(model, Layout()).state
        for fp8_kv_cache in (False, True):
            need = needs(model, Layout(fp8_kv_cache=fp8_kv_cache))
            cells.append(f"{need.kv_per_token / 1024:.0f} KiB")
            cells.append(_gib(need.kv_per_token * CONTEXT))
        cells.append(f"{state / 2**20:.0f} MiB" if state else "none")
        sizes.append(" | ".join(cells))
    fits = [
        " | ".join([name, *(_options(config_of(name), gpu) for gpu in GPUS.values())])
        for name in MODELS
    ]
    return page(
        "Memory",
        "`launch models` prints these figures for the checkpoints in the cache of the Hugging Face "
        "Hub, and whether they fit this machine. A test compares them with the parameters of the "
        "model: the KV cache is exact, weights are within 2 % (experts of integers at `--tp 8`: "
        "6 %). On CPUs numbers have four bytes instead of two. A running sequence of a model with "
        "recurrent state has two [state blocks](../architecture/sequence-state.md#state-blocks), "
        "and a checkpoint is one; they lie in the memory of the KV cache.",
        table(
            "model | weights, bfloat16 | `--quantization fp8` | KV a token | KV of 32k tokens | "
            "`--kv-cache-dtype fp8`: KV a token | of 32k tokens | state block",
            sizes,
        ),
        "## GPUs",
        "The fewest GPUs with which a model fits, and whether it needs `--quantization fp8` there. "
        "A model fits if weights, one sequence of 32,768 tokens with its state, and an estimated "
        "largest step take at most 0.9 of the memory "
        "(`--gpu-memory-utilization`). The table is computed and counts memory only: measurements "
        "were made on H200.",
        table(" | ".join(["model", *GPUS]), fits),
    )


def _options(model: ModelConfig, mebibytes: int) -> str:
    available = mebibytes * 2**20 * Config().gpu_memory_utilization
    for tp in (1, 2, 4, 8):
        for quantization in ("none", "fp8"):
            config = quantized(model, quantization)
            try:
                describe(config).check_ranks(tp)
            except ModelError:
                continue
            if needs(config, Layout(tp=tp)).with_context(CONTEXT) <= available:
                return f"{tp}{', fp8' if quantization == 'fp8' else ''}"
    return "no"


def _link(name: str) -> str:
    return name if name.startswith("(") else f"[{name}](https://huggingface.co/Qwen/{name})"


def _why(refusal: str) -> str:
    """Return the reason in words, from the pattern of the sentence."""
    for word, reason in (
        ("MLX", "weights in MLX: use the FP8 checkpoint of the same model"),
        ("GGUF", "a repository of GGUF files: give the path of one downloaded file"),
        ("Qwen4", "sparse attention: not yet"),
        ("older", "an older generation: use Qwen3"),
        ("images", "takes images or audio"),
        ("classifier", "a classifier of tokens: use Qwen3Guard-Gen"),
    ):
        if word in refusal:
            return reason
    raise AssertionError(refusal)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
