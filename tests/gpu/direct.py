"""The worker driven directly, scheduler and model in one process: what the pipeline adds to it.

`python -m tests.gpu.direct --model FOLDER offline`, or `latency --batches 1 16 64`, or `json`: rows
with a JSON grammar decode in turns with plain rows. `decode`: 128 tokens after 256, without the
steps before all rows decode. `prefill`: milliseconds of 8,192 tokens. Other options are those of
`launch all`. The workloads are those of `launch bench`; the prefix cache is off, or a second run
would find the first one's prompts. `--speculative-method mtp --forced 2`: two drafts of each step
count as right.
"""

import argparse
import json
import random
import statistics
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from penstock.launch.pipeline.options import add_options, given_options
from penstock.protocol.config import OPTIONS, Config
from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.plan import BatchPlan, SampledTokens
from penstock.protocol.messages.sampling import SamplingParams
from penstock.protocol.messages.structured import StructuredOutputs
from tests.engine import Engine
from tests.gpu.forced_drafts import force

PLANS = msgspec.msgpack.Decoder(BatchPlan)
WORKLOADS = "offline", "latency", "decode", "prefill", "json"
Request = tuple[list[int], int]
"""prompt, number of output tokens"""
SCHEMA = {"type": "array", "minItems": 1000, "items": {"type": "object"}}
"""does not end within a run; most tokens are allowed in most places"""


def offline_requests(seed: int = 0) -> list[Request]:
    """Return the workload of nano-vllm's bench.py."""
    draw = random.Random(seed)
    prompts = [[draw.randint(0, 10000) for _ in range(draw.randint(100, 1024))] for _ in range(256)]
    return [(prompt, draw.randint(100, 1024)) for prompt in prompts]


def fixed_requests(batch: int, num_in: int, num_out: int) -> list[Request]:
    """`batch` requests of one size."""
    return [([random.randint(0, 10000) for _ in range(num_in)], num_out) for _ in range(batch)]


def run(
    engine: Engine, name: str, requests: list[Request], decodes: bool = False, **fields: Any
) -> float:
    """Output tokens a second; decodes: only of the steps after the first of all rows."""
    start = time.perf_counter()
    for number, (prompt, num_out) in enumerate(requests):
        sampling = SamplingParams(
            temperature=0.6,
            top_k=-1,
            top_p=1.0,
            min_p=0.0,
            max_tokens=num_out,
            ignore_eos=True,
            **fields,
        )
        prompt = [token_id % engine.model.vocab_size for token_id in prompt]
        engine.add(f"{name}-{number}", prompt, sampling)
    steps = deque()  # type: ignore[var-annotated]
    num_tokens = sum(num_out for _, num_out in requests)
    num_left = num_tokens
    while True:
        while plan := engine.scheduler.schedule():
            decoded = PLANS.decode(msgspec.msgpack.encode(plan))
            steps.append((plan.step, engine.runner.launch(decoded)))
        if not steps:
            break
        number, launched = steps.popleft()
        token_ids = launched.token_ids()
        output = engine.scheduler.update(
            SampledTokens(0, number, pack(token_ids), *launched.output())
        )
        engine.scheduler.draft_scheduler.on_tokens(time.perf_counter())
        num_left -= len(output.token_ids)
        if decodes and len(token_ids) == len(requests):
            decodes, num_tokens, start = False, num_left, time.perf_counter()
    return num_tokens / (time.perf_counter() - start)


def compare_json(engine: Engine, batch: int, num_runs: int) -> dict[str, Any]:
    """Decode `batch` rows with and without a JSON grammar, in turns."""
    kinds = {"plain": {}, "json": {"structured_outputs": StructuredOutputs(json=SCHEMA)}}
    speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(num_runs):
        for kind, fields in kinds.items():
            requests = fixed_requests(batch, 64, 224)
            name = f"{kind} {batch} {number}"
            speeds[kind].append(run(engine, name, requests, decodes=True, **fields))
    plain, with_json = (statistics.median(some) for some in speeds.values())
    row = {"rows": batch, "plain": round(plain), "json": round(with_json)}
    return row | {"share": round(with_json / plain, 3), "runs": speeds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=list(WORKLOADS), nargs="+")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--forced", type=int, help="drafts of each step that count as right")
    add_options(parser, Config, OPTIONS)
    arguments = parser.parse_args()
    if arguments.forced is not None:
        force(arguments.forced)
    start = time.perf_counter()
    options = {"enable_prefix_caching": False} | given_options(arguments, Config)
    engine = Engine(Config(**options))
    print(f"ready after {time.perf_counter() - start:.1f} s", flush=True)
    workloads: dict[str, Callable[[], list[Request]]] = {}
    if "latency" in arguments.workload:
        for batch in arguments.batches:
            workloads[f"batch {batch}"] = partial(fixed_requests, batch, 256, 256)
    if "offline" in arguments.workload:
        workloads["offline"] = offline_requests
    run(engine, "warm", fixed_requests(8, 300, 20))
    for name, requests in workloads.items():
        speeds = [run(engine, f"{name} {n}", requests()) for n in range(arguments.runs)]
        idle = engine.runner.idle_us()
        row = {"workload": name, "tokens/s": round(statistics.median(speeds))}
        row |= {"runs": [round(speed) for speed in speeds], "idle_us": idle}
        row["preemptions"] = engine.scheduler.num_preemptions
        row["KV tokens"] = engine.runner.num_blocks * engine.runner.block_size
        print(json.dumps(row), flush=True)
    for batch in arguments.batches if "decode" in arguments.workload else ():
        name, sizes = f"decode {batch}", (batch, 256, 128)
        speeds = [
            run(engine, f"{name} {n}", fixed_requests(*sizes), decodes=True)
            for n in range(arguments.runs)
        ]
        row = {"workload": name, "tokens/s": round(statistics.median(speeds), 1)}
        print(json.dumps(row | {"runs": [round(speed, 1) for speed in speeds]}), flush=True)
    if "prefill" in arguments.workload:
        requests = fixed_requests(1, 8192, 1)
        times = [1e3 / run(engine, f"prefill {n}", requests) for n in range(arguments.runs)]
        print(
            json.dumps({"workload": "prefill", "ms": [round(one, 1) for one in times]}), flush=True
        )
    for batch in arguments.batches if "json" in arguments.workload else ():
        print(json.dumps(compare_json(engine, batch, arguments.runs)), flush=True)


if __name__ == "__main__":
    main()
