"""The flags of `launch bench`, a parser for each subject, and what each prints."""

from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.launch.bench import pipeline
from penstock.launch.bench.make_model import add_make_model
from penstock.launch.bench.model import bench_latency, bench_offline, bench_serve
from penstock.launch.bench.numbers import count, limit, positive, share
from penstock.launch.bench.report import as_json, latency_table, offline_table, serve_table
from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.options import add_pipeline_options
from penstock.protocol.config import Config

PREFIX_CACHING = (
    "The pipeline that it starts runs without prefix caching, unless --enable-prefix-caching is "
    "given; in a running one (--name, --endpoint) the prompts differ from run to run only."
)
COUNTS: dict[str, dict[str, tuple[Any, str]]] = {
    "pipeline": {
        "--batches": ([1, 64, 256], "requests at once"),
        "--detokenizers": ([1, 2, 4], "detokenizer processes"),
        "--max-tokens": (1000, "tokens of each request"),
    },
    "offline": {
        "--num-requests": (256, "requests, all sent at once"),
        "--min-tokens": (100, "shortest prompt, and shortest output"),
        "--max-tokens": (1024, "longest prompt, and longest output"),
    },
    "latency": {
        "--batches": ([1, 16, 64], "requests at once"),
        "--input-tokens": (256, "tokens of each prompt"),
        "--output-tokens": (256, "tokens of each output"),
    },
    "serve": {
        "--num-requests": (200, "requests of a run"),
        "--request-rate": (10.0, "requests a second on the mean, in a Poisson process"),
        "--input-tokens": (256, "tokens of each short prompt"),
        "--long-input-tokens": (8192, "tokens of each long prompt"),
        "--long-share": (0.0, "share of the requests whose prompt is long, from 0 to 1"),
        "--output-tokens": (256, "tokens of each output"),
    },
}
NOT_OWN = ("name", "endpoint", "http")


def add_arguments(command: ArgumentParser) -> None:
    """Add `launch bench pipeline`, `offline`, `latency`, `serve` and `make-model`."""
    subjects = command.add_subparsers(metavar="SUBJECT", required=True)
    for name, run, text in (
        ("pipeline", _pipeline, "the cost of everything but the model"),
        ("offline", _offline, "throughput: many requests at once, of many lengths"),
        ("latency", _latency, "speed of small batches of one length, and of streams"),
        ("serve", _serve, "what clients see of requests that arrive at a given rate"),
    ):
        more = "" if name == "pipeline" else f". {PREFIX_CACHING}"
        subject = subjects.add_parser(name, help=text, description=text + more, allow_abbrev=False)
        subject.set_defaults(run=run)
        for flag, (default, meaning) in COUNTS[name].items():
            _add_count(subject, flag, default, meaning)
        runs = 1 if name == "serve" else 3
        _add_count(subject, "--runs", runs, "runs of which the median is shown")
        text = "for programs: printed in place of the table, or written into FILE beside it"
        subject.add_argument("--json", nargs="?", const="-", metavar="FILE", help=text)
        if name == "serve":
            _add_serve(subject)
        if name != "pipeline":
            _add_target(subject)
    text = "write a checkpoint of a published shape with random weights, to be measured"
    add_make_model(
        subjects.add_parser("make-model", help=text, description=text, allow_abbrev=False)
    )


def _add_count(command: ArgumentParser, flag: str, default: Any, text: str) -> None:
    """Take several numbers where the default is a list."""
    nargs = "+" if isinstance(default, list) else None
    text = f"{text} (default: {str(default).strip('[]').replace(',', '')})"
    metavar = flag.rpartition("-")[2].upper()
    command.add_argument(
        flag,
        type=CONVERTERS.get(flag, count),
        nargs=nargs,
        default=default,
        metavar=metavar,
        help=text,
    )


def _add_serve(command: ArgumentParser) -> None:
    command.add_argument(
        "--goodput",
        type=limit,
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="count the requests that keep within milliseconds: ttft:500 tpot:50 e2el:9000",
    )


CONVERTERS: dict[str, Callable[[str], float]] = {
    "--request-rate": positive,
    "--long-share": share,
}


def _add_target(command: ArgumentParser) -> None:
    """Add the options of sampling, and of the pipeline that is measured."""
    command.add_argument("--bench-seed", type=int, default=0, help="of the prompts (default: 0)")
    command.add_argument("--temperature", type=float, default=0.6, help="(default: 0.6)")
    command.add_argument("--top-k", type=int, default=-1, help="(default: -1, all tokens)")
    command.add_argument("--top-p", type=float, default=1.0, help="(default: 1, all tokens)")
    text = "measure this running pipeline, not one of its own"
    command.add_argument("--name", default=SUPPRESS, help=text)
    command.add_argument("--endpoint", help="likewise; --model then says which model runs there")
    own = [field for field in Config.__struct_fields__ if field not in NOT_OWN]
    add_pipeline_options(command, own)


def _pipeline(arguments: Namespace) -> int:
    counts = arguments.batches, arguments.detokenizers, arguments.max_tokens, arguments.runs
    return _show(pipeline.bench_pipeline(*counts), pipeline.as_table, arguments.json)


def _offline(arguments: Namespace) -> int:
    least, most = arguments.min_tokens, arguments.max_tokens
    if least > most:
        raise LaunchError(f"--min-tokens is {least}: more than --max-tokens, {most}")
    return _show(bench_offline(arguments), offline_table, arguments.json)


def _latency(arguments: Namespace) -> int:
    return _show(bench_latency(arguments), latency_table, arguments.json)


def _serve(arguments: Namespace) -> int:
    arguments.goodput = dict(arguments.goodput)
    return _show(bench_serve(arguments), serve_table, arguments.json)


def _show(report: Any, as_table: Callable[[Any], str], file: str | None) -> int:
    """`file`: of `--json`; "-" is where else the table is printed."""
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
