"""The flags of `launch bench`, with a parser for each subject, and the printed results."""

import os
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from penstock.launch.bench import options
from penstock.launch.bench.figures import latency_table, offline_table, serve_table
from penstock.launch.bench.model import bench_latency, bench_offline, bench_serve
from penstock.launch.bench.pipeline import (
    bench_events,
    bench_pipeline,
    events_table,
    pipeline_table,
)
from penstock.launch.commands.status import as_json
from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.options import add_options, add_pipeline_options, given_options
from penstock.protocol.config import OPTIONS

PREFIX_CACHING = (
    "The pipeline that it starts runs without prefix caching, unless --enable-prefix-caching is "
    "given; in a running one (--name, --endpoint) the prompts differ from run to run only."
)
SIZES = (
    *("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B"),
    *("3.5-0.8B", "3.5-4B", "3.5-9B", "3.5-27B", "3.5-35B-A3B"),
)
FORMATS = ("fp8", "awq", "gptq")
# defines the shapes; the module needs torch, which `launch` does not import
MODULE = "penstock.models.random_checkpoint"


class Subject(NamedTuple):
    """Subject of `launch bench`."""

    text: str
    options: type[options.BenchOptions]
    bench: Callable[[Any, Namespace], Any]
    as_table: Callable[[Any], str]


SUBJECTS = {
    "pipeline": Subject(
        "the cost of everything but the model",
        options.PipelineOptions,
        bench_pipeline,
        pipeline_table,
    ),
    "events": Subject(
        "the cost of server-sent events, with a stand-in for the model",
        options.EventsOptions,
        bench_events,
        events_table,
    ),
    "offline": Subject(
        "throughput: many requests at once, of many lengths",
        options.OfflineOptions,
        bench_offline,
        offline_table,
    ),
    "latency": Subject(
        "speed of small batches of one length, and of streams",
        options.LatencyOptions,
        bench_latency,
        latency_table,
    ),
    "serve": Subject(
        "what clients see of requests that arrive at a given rate",
        options.ServeOptions,
        bench_serve,
        serve_table,
    ),
}
NAMES_OF_VLLM = {
    "num_requests": "--num-prompts",
    "input_tokens": "--random-input-len",
    "output_tokens": "--random-output-len",
}
NOT_OWN = ("name", "endpoint", "http")


def add_arguments(command: ArgumentParser) -> None:
    """Add `launch bench pipeline`, `offline`, `latency`, `serve` and `make-model`."""
    subjects = command.add_subparsers(metavar="SUBJECT", required=True)
    for name, entry in SUBJECTS.items():
        has_model = name not in ("pipeline", "events")
        text = f"{entry.text}. {PREFIX_CACHING}" if has_model else entry.text
        subject = subjects.add_parser(name, help=entry.text, description=text, allow_abbrev=False)
        subject.set_defaults(run=partial(_run, entry))
        fields = entry.options.__struct_fields__
        names = NAMES_OF_VLLM if name == "serve" else {}
        chosen = [field for field in fields if field != "goodput"]
        add_options(subject, entry.options, chosen, names=names)
        text = "print JSON instead of the table, or print the table and write JSON to FILE"
        subject.add_argument("--json", nargs="?", const="-", metavar="FILE", help=text)
        if name == "serve":
            text = "count the requests within these limits (ms): ttft:500 tpot:50 e2el:9000"
            limits: dict[str, Any] = {"type": options.limit, "nargs": "+", "metavar": "NAME:MS"}
            subject.add_argument("--goodput", default=SUPPRESS, help=text, **limits)
        if has_model:
            _add_target(subject)
        if name == "serve":
            text = (
                "measure the server at this address over HTTP, such as http://127.0.0.1:8000; it "
                "may be any that has OpenAI's API. --model is its name of the model then"
            )
            subject.add_argument("--base-url", metavar="URL", help=text)
    text = "write a checkpoint of a published shape with random weights, to be measured"
    add_make_model(
        subjects.add_parser("make-model", help=text, description=text, allow_abbrev=False)
    )


def _add_target(command: ArgumentParser) -> None:
    """Add the options of the measured pipeline."""
    text = "measure this running pipeline instead of starting one"
    command.add_argument("--name", default=SUPPRESS, help=text)
    text = "measure the pipeline at this address; set --model to the model that it runs"
    command.add_argument("--endpoint", help=text)
    own = [field for field in OPTIONS if field not in NOT_OWN]
    add_pipeline_options(command, own)


def _run(subject: Subject, arguments: Namespace) -> int:
    chosen = subject.options(**given_options(arguments, subject.options))
    return _show(subject.bench(chosen, arguments), subject.as_table, arguments.json)


def _show(report: Any, as_table: Callable[[Any], str], file: str | None) -> int:
    """Print a report as a table, or as JSON if `file` is "-"; otherwise also write it to `file`."""
    if file == "-":
        print(as_json(report))
        return 0
    print(as_table(report))
    if file:
        try:
            Path(file).write_text(as_json(report) + "\n")
        except OSError as error:
            raise LaunchError(f"--json {file}: {error.strerror}") from error
    return 0


def add_make_model(command: ArgumentParser) -> None:
    """Add the arguments of `launch bench make-model`."""
    command.set_defaults(run=_make_model)
    command.add_argument("size", choices=SIZES, metavar="SIZE", help=", ".join(SIZES))
    command.add_argument("folder", type=Path, metavar="FOLDER", help="a new or empty one")
    text = "of the weights: bfloat16, float16 or float32 (default: %(default)s)"
    dtypes = ("bfloat16", "float16", "float32")
    command.add_argument("--dtype", choices=dtypes, default=dtypes[0], metavar="DTYPE", help=text)
    text = "format of the layers' products: fp8 (as Qwen3-…-FP8), awq, or gptq (default: 16 bits)"
    command.add_argument("--quantization", choices=FORMATS, metavar="FORMAT", help=text)
    command.add_argument("--fp8", action="store_true", help="short for --quantization fp8")
    text = "layers, where not as many as published"
    command.add_argument("--layers", type=int, metavar="N", help=text)


def _make_model(arguments: Namespace) -> int:
    folder: Path = arguments.folder
    if arguments.layers is not None and arguments.layers < 1:
        raise LaunchError(f"--layers: got {arguments.layers}, expected 1 or more")
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise LaunchError(f"{folder} exists and is not an empty folder; give another name")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"FOLDER: {folder} can't be made: {error.strerror}") from error
    quantization = "fp8" if arguments.fp8 else arguments.quantization
    flags = ["--quantization", quantization] if quantization else []
    if arguments.layers:
        flags += ["--layers", str(arguments.layers)]
    words = [arguments.size, str(folder), "--dtype", arguments.dtype, *flags]
    os.execv(sys.executable, [sys.executable, "-P", "-m", MODULE, *words])  # noqa: S606
