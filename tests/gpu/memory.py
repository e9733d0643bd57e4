"""Memory that models need on this GPU, compared with `launch models`' arithmetic.

`python -m tests.gpu.memory 0.6B 8B 8B:fp8 8B:fp8:fp8` prints a line for each folder, with
`--quantization` and `--kv-cache-dtype` after colons. The worker gets as much of the GPU as the
arithmetic says for a context of 32,768 tokens. So it must start, with a KV cache for at least as
many tokens, and the largest step must stay within the limit.
"""

import subprocess
import sys
from pathlib import Path

import torch

from penstock.launch.extras.models import Layout, needs
from penstock.protocol.checkpoint import read_model_config
from penstock.protocol.config import Config
from penstock.services.worker.memory.kv_cache import worst_case_plan
from tests.engine import Engine

GIB = 1 << 30
CONTEXT = 32768
COLUMNS = "model", "weights: computed", "measured", "needs", "KV tokens", "peak"


def measure(folder: str, quantization: str = "none", kv_cache_dtype: str = "auto") -> list[str]:
    """Return the cells of a line. Raises what the worker raises where it does not fit."""
    model = read_model_config(Path(folder), quantization)
    need = needs(model, Layout(fp8_kv_cache=kv_cache_dtype == "fp8"))
    limit = need.with_context(CONTEXT)
    config = Config(
        model=folder,
        device="cuda",
        quantization=quantization,  # type: ignore[arg-type]
        kv_cache_dtype=kv_cache_dtype,  # type: ignore[arg-type]
        gpu_memory_utilization=limit / torch.cuda.mem_get_info()[1],
    )
    engine = Engine(config)
    runner = engine.runner
    runner.launch(worst_case_plan(config, CONTEXT, runner.block_size, with_extras=True)).output()
    torch.cuda.synchronize()
    free, available = torch.cuda.mem_get_info()
    weights = sum(one.nbytes for one in runner._model.parameters())
    num_tokens = runner.num_blocks * runner.block_size
    sizes = need.weights, weights, limit, available - free
    computed, measured, needed, peak = (f"{size / GIB:.2f} GiB" for size in sizes)
    return [computed, measured, needed, f"{num_tokens:,}", peak]


def main() -> None:
    """Measure each model in a process of its own."""
    if sys.argv[1] == "--one":
        print("MEASURED", *measure(*sys.argv[2].split(":")), sep=" | ")
        return
    print(*COLUMNS, sep=" | ")
    for name in sys.argv[1:]:
        command = [sys.executable, "-m", "tests.gpu.memory", "--one", name]
        output = subprocess.run(command, check=False, capture_output=True, text=True)
        found = [line for line in output.stdout.splitlines() if line.startswith("MEASURED")]
        print(name, *found, *([] if found else output.stderr.splitlines()[-1:]), flush=True)


if __name__ == "__main__":
    main()
