"""Times of a prefix that is computed, or comes from host memory or files; cost without hits.

`python -m tests.gpu.tiers --model FOLDER prefix --kv-offload-gib 12 --kv-offload-folder DIR`, or
`offline`. Other options are those of `launch all`.
"""

import argparse
import json
import random
import time
from typing import Any

from penstock.launch.pipeline.options import add_options, given_options
from penstock.protocol.config import OPTIONS, Config
from penstock.protocol.messages.sampling import SamplingParams
from penstock.services.scheduler.sequence import Sequence
from tests.engine import Engine
from tests.gpu.direct import offline_requests


class TierEngine(Engine):
    """An engine that measures."""

    def forget(self) -> None:
        """Forget all KV, except that in files."""
        self.scheduler.block_manager.forget(0)
        self.use_tiers()

    def generate(self, prompts: list[tuple[list[int], int]]) -> tuple[float, list[Sequence]]:
        """Return seconds, and the sequences."""
        start, sequences = time.perf_counter(), []
        for number, (prompt, num_out) in enumerate(prompts):
            sampling = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)
            prompt = [token_id % self.model.vocab_size for token_id in prompt]
            sequences.append(self.add(f"{start}-{number}", prompt, sampling))
        self.run()
        return time.perf_counter() - start, sequences


def measure_prefix(engine: TierEngine, num_tokens: int) -> None:
    draw = random.Random(1)
    a, b = ([draw.randrange(10_000) for _ in range(num_tokens)] for _ in range(2))
    engine.generate([(a[:5000], 2)])
    engine.forget()
    texts: dict[str, list[int]] = {}
    for name, prompt in (("a", a), ("b", b), ("a", a), ("b", b), ("a", a)):
        seconds, [one] = engine.generate([(prompt, 4)])
        index = engine.scheduler.block_manager.offload
        row: dict[str, Any] = {"prompt": name, "cached": one.num_cached_tokens}
        row |= {"ms": round(seconds * 1000, 1), "loaded": index.num_loaded if index else 0}
        row["same tokens"] = texts.setdefault(name, one.output_token_ids) == one.output_token_ids
        print(json.dumps(row), flush=True)
    for seed in (2, 3):  # whatever is on the GPU is evicted
        draw = random.Random(seed)
        engine.generate([([draw.randrange(10_000) for _ in range(num_tokens)], 2)])
    num_blocks = num_tokens // engine.runner.block_size
    while engine.runner.offload.folder and engine.num_files < 2 * num_blocks:
        if not engine._news.wait(5):
            break
        engine._news.clear()
        engine.take_reports()
    engine.forget()
    engine.generate([([1, 2, 3], 2)])
    for name, prompt in (("a", a), ("b", b)):
        seconds, [one] = engine.generate([(prompt, 4)])
        row = {"prompt": f"{name}, files", "cached": one.num_cached_tokens}
        row |= {"ms": round(seconds * 1000, 1), "files": engine.num_files}
        row["same tokens"] = texts[name] == one.output_token_ids
        print(json.dumps(row), flush=True)


def measure_offline(engine: TierEngine, num_runs: int) -> None:
    engine.generate([([1] * 300, 20)] * 8)
    for seed in range(num_runs):
        requests = offline_requests(seed)
        seconds, _ = engine.generate(requests)
        index = engine.scheduler.block_manager.offload
        row: dict[str, Any] = {
            "run": seed,
            "tokens/s": round(sum(n for _, n in requests) / seconds),
        }
        row["on the host"] = index.num_blocks if index else 0
        print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=["prefix", "offline"])
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--runs", type=int, default=2)
    add_options(parser, Config, OPTIONS)
    arguments = parser.parse_args()
    start = time.perf_counter()
    engine = TierEngine(Config(**given_options(arguments, Config)))
    print(f"ready after {time.perf_counter() - start:.1f} s", flush=True)
    if arguments.workload == "prefix":
        measure_prefix(engine, arguments.tokens)
    else:
        measure_offline(engine, arguments.runs)


if __name__ == "__main__":
    main()
