"""`launch bench transformers`: the workload of `launch bench latency` by transformers' own loop."""

import os
import statistics
import subprocess
import sys
from argparse import Namespace
from typing import Any

import msgspec

from penstock.launch.bench.report import hardware, versions
from penstock.launch.bench.workload import fixed_lengths, variant
from penstock.launch.commands.options import given_options
from penstock.launch.errors import LaunchError
from penstock.launch.run_folder import model_name
from penstock.protocol.checkpoint import ModelError, read_model_config
from penstock.protocol.config import Config

WORKLOAD = ("batches", "input_tokens", "output_tokens", "runs")


def bench_transformers(arguments: Namespace) -> dict[str, Any]:
    """Measures in a process of its own, for it needs torch. Raises LaunchError."""
    config = Config(**given_options(arguments, Config))
    try:
        vocab_size = read_model_config(config.model_folder).vocab_size
    except ModelError as error:
        raise LaunchError(f"--model: {error}") from error
    lengths = arguments.input_tokens, arguments.output_tokens
    work = {
        "model": str(config.model_folder),
        "batches": [
            [item.prompt for item in variant(fixed_lengths(batch, *lengths, batch), 0, vocab_size)]
            for batch in arguments.batches
        ],
        "output_tokens": arguments.output_tokens,
        "runs": arguments.runs,
        "num_threads": len(os.sched_getaffinity(0)),
    }
    child = subprocess.run(
        [sys.executable, "-P", "-m", "penstock.models.generate"],
        input=msgspec.json.encode(work),
        stdout=subprocess.PIPE,
        check=False,
    )
    if child.returncode:
        raise LaunchError(f"transformers ended with exit code {child.returncode}")
    medians = map(statistics.median, msgspec.json.decode(child.stdout, type=list[list[float]]))
    return {
        "subject": "transformers",
        "model": model_name(config),
        "hardware": hardware(),
        "versions": versions("transformers"),
        "workload": {name: getattr(arguments, name) for name in WORKLOAD},
        "batches": [
            {
                "batch": batch,
                "duration": seconds,
                "output_throughput": batch * arguments.output_tokens / seconds,
            }
            for batch, seconds in zip(arguments.batches, medians, strict=True)
        ],
    }
