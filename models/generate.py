"""transformers' own generate loop on a CPU, for scale: what `launch bench transformers` runs.

Takes a `Workload` as JSON on standard input and prints the seconds of each run of each batch.
"""

import sys
import time
from pathlib import Path

import msgspec
import torch
from msgspec import Struct
from transformers import AutoModelForCausalLM


class Workload(Struct):
    """Batches of prompts of one length, in float32, as the CPU path computes."""

    model: str
    batches: list[list[list[int]]]
    """token ids of each prompt of each batch"""
    output_tokens: int
    runs: int
    num_threads: int


def main() -> None:
    """Measures, behind one run of each batch that is not counted."""
    work = msgspec.json.decode(sys.stdin.buffer.read(), type=Workload)
    torch.set_num_threads(work.num_threads)
    model = AutoModelForCausalLM.from_pretrained(Path(work.model), dtype=torch.float32)
    seconds = [[_run(model, batch, work) for _ in range(work.runs + 1)] for batch in work.batches]
    print(msgspec.json.encode([runs[1:] for runs in seconds]).decode())  # noqa: T201


def _run(model: torch.nn.Module, batch: list[list[int]], work: Workload) -> float:
    prompts = torch.tensor(batch)
    start = time.perf_counter()
    model.generate(  # type: ignore[operator]
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        min_new_tokens=work.output_tokens,
        max_new_tokens=work.output_tokens,
        pad_token_id=0,
    )
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
