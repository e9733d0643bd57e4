"""The flags of `launch bench`, a parser for each subject, and what each prints."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.launch.bench.make_model import add_make_model
from penstock.launch.bench.numbers import count, limit, positive, share
from penstock.launch.commands.options import add_options, add_pipeline_options
from penstock.launch.errors import LaunchError
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
    "transformers": {
        "--batches": ([1, 16], "prompts at once"),
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
    "overload": {
        "--factor": (10.0, "times the capacity that is offered, in a Poisson process"),
        "--seconds": (60.0, "seconds for which it is offered"),
        "--capacity-seconds": (20.0, "seconds in which the capacity is measured before"),
        "--concurrency": (None, "requests at once of that"),
        "--input-tokens": (256, "tokens of each prompt"),
        "--output-tokens": (128, "tokens of an output on the mean"),
    },
    "prefix": {
        "--conversations": (64, "conversations"),
        "--concurrency": (16, "of them at once"),
        "--turns": (5, "requests of each, one behind the other"),
        "--system-prompts": (8, "beginnings that the conversations share"),
        "--system-tokens": (512, "tokens of each of these"),
        "--input-tokens": (128, "tokens that are new in each turn"),
        "--output-tokens": (32, "tokens of each output"),
    },
}
NOT_OWN = ("name", "endpoint", "http")
OWN_MODEL = ("pipeline", "transformers")
"""what they measure is no pipeline with a model"""


def add_bench(command: ArgumentParser) -> None:
    """`launch bench pipeline`, `offline`, `latency`, `serve`, `overload`, `plot` and others."""
    subjects = command.add_subparsers(metavar="SUBJECT", required=True)
    for name, run, text in (
        ("pipeline", _pipeline, "the cost of everything but the model"),
        ("offline", _offline, "throughput: many requests at once, of many lengths"),
        ("latency", _latency, "speed of small batches of one length, and of streams"),
        ("serve", _serve, "what clients see of requests that arrive at a given rate"),
        (
            "transformers",
            _transformers,
            "the batches of `latency` by transformers' own loop, on CPUs",
        ),
        ("overload", _overload, "what comes of more requests than can be answered"),
        ("prefix", _prefix, "conversations that begin alike: what --routing finds in the caches"),
    ):
        more = "" if name in (*OWN_MODEL, "prefix") else f". {PREFIX_CACHING}"
        subject = subjects.add_parser(name, help=text, description=text + more, allow_abbrev=False)
        subject.set_defaults(run=run)
        for flag, (default, meaning) in COUNTS[name].items():
            _add_count(subject, flag, default, meaning)
        if name not in ("overload", "prefix"):
            _add_count(
                subject, "--runs", 1 if name == "serve" else 3, "runs of which the median is shown"
            )
        text = "for programs: printed in place of the table, or written into FILE beside it"
        subject.add_argument("--json", nargs="?", const="-", metavar="FILE", help=text)
        if name == "serve":
            _add_serve(subject)
        if name == "transformers":
            add_options(subject, Config, ["model"])
        elif name not in OWN_MODEL:
            _add_target(subject)
    text = "draw throughput against latency, from results of `serve` and `latency`"
    _add_plot(subjects.add_parser("plot", help=text, description=text, allow_abbrev=False))
    text = "write a checkpoint of a published shape with random weights, to be measured"
    add_make_model(
        subjects.add_parser("make-model", help=text, description=text, allow_abbrev=False)
    )


def _add_plot(command: ArgumentParser) -> None:
    command.add_argument("files", type=Path, nargs="+", metavar="FILE", help="of --json")
    text = "what to draw, by its ending: png, svg or pdf (default: %(default)s)"
    command.add_argument("--output", type=Path, default="bench.png", metavar="FILE", help=text)
    command.set_defaults(run=_plot)


def _add_count(command: ArgumentParser, flag: str, default: Any, text: str) -> None:
    """Takes several numbers where the default is a list."""
    nargs = "+" if isinstance(default, list) else None
    shown = "twice --max-num-seqs" if default is None else str(default).strip("[]")
    text = f"{text} (default: {shown.replace(',', '')})"
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
    text = "measure each run once more over HTTP, as streams of OpenAI's completions"
    command.add_argument("--http", action="store_true", help=text)


CONVERTERS: dict[str, Callable[[str], float]] = {
    "--request-rate": positive,
    "--factor": positive,
    "--seconds": positive,
    "--capacity-seconds": positive,
    "--long-share": share,
}


def _add_target(command: ArgumentParser) -> None:
    """How tokens are drawn and sampled, and which pipeline is measured."""
    command.add_argument("--bench-seed", type=int, default=0, help="of the prompts (default: 0)")
    command.add_argument("--temperature", type=float, default=0.6, help="(default: 0.6)")
    command.add_argument("--top-k", type=int, default=-1, help="(default: -1, all tokens)")
    command.add_argument("--top-p", type=float, default=1.0, help="(default: 1, all tokens)")
    command.add_argument("--name", help="measure this running pipeline, not one of its own")
    command.add_argument("--endpoint", help="likewise; --model then says which model runs there")
    own = [field for field in Config.__struct_fields__ if field not in NOT_OWN]
    add_pipeline_options(command, own)


def _pipeline(arguments: Namespace) -> int:
    from penstock.launch.bench.pipeline import as_table, bench_pipeline

    counts = arguments.batches, arguments.detokenizers, arguments.max_tokens, arguments.runs
    return _show(bench_pipeline(*counts), as_table, arguments.json)


def _offline(arguments: Namespace) -> int:
    from penstock.launch.bench.model import bench_offline
    from penstock.launch.bench.report import offline_table

    least, most = arguments.min_tokens, arguments.max_tokens
    if least > most:
        raise LaunchError(f"--min-tokens is {least}: more than --max-tokens, {most}")
    return _show(bench_offline(arguments), offline_table, arguments.json)


def _latency(arguments: Namespace) -> int:
    from penstock.launch.bench.model import bench_latency
    from penstock.launch.bench.report import latency_table

    return _show(bench_latency(arguments), latency_table, arguments.json)


def _serve(arguments: Namespace) -> int:
    from penstock.launch.bench.model import bench_serve
    from penstock.launch.bench.report import serve_table

    arguments.goodput = dict(arguments.goodput)
    return _show(bench_serve(arguments), serve_table, arguments.json)


def _transformers(arguments: Namespace) -> int:
    from penstock.launch.bench.report import transformers_table
    from penstock.launch.bench.transformers import bench_transformers

    return _show(bench_transformers(arguments), transformers_table, arguments.json)


def _overload(arguments: Namespace) -> int:
    from penstock.launch.bench.model import bench_overload
    from penstock.launch.bench.report import overload_table

    return _show(bench_overload(arguments), overload_table, arguments.json)


def _prefix(arguments: Namespace) -> int:
    from penstock.launch.bench.prefix import as_table, bench_prefix

    return _show(bench_prefix(arguments), as_table, arguments.json)


def _plot(arguments: Namespace) -> int:
    from penstock.launch.bench.plot import plot

    plot(arguments.files, arguments.output)
    print(arguments.output)
    return 0


def _show(report: Any, as_table: Callable[[Any], str], file: str | None) -> int:
    """`file`: of `--json`; "-" is where else the table is printed."""
    from penstock.launch.bench.report import as_json

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
