"""The flags of `launch chaos`, and what it prints."""

from argparse import SUPPRESS, ArgumentParser, Namespace

from penstock.launch.bench.report import as_json
from penstock.launch.chaos.report import as_table
from penstock.launch.chaos.run import chaos
from penstock.launch.chaos.schedule import KINDS, ChaosOptions
from penstock.launch.pipeline.options import add_options, add_pipeline_options, given_options
from penstock.protocol.config import Config

EXIT_CODE = (
    "Exits with 1 if anything was lost or doubled, or is still there afterwards; on a CPU also if "
    "an answer differs from that of the undisturbed run."
)
RUNNING = (
    "test this running pipeline instead of starting one. Start the pipeline with a large "
    "--max-deaths: it ends when one process dies that many times within 60 s (default: 5)"
)


def add_arguments(command: ArgumentParser) -> None:
    """Add the arguments."""
    command.set_defaults(run=_chaos)
    command.epilog = EXIT_CODE
    add_options(command, ChaosOptions)
    text = f"kinds of processes to kill (default: all; {' '.join(KINDS)})"
    command.add_argument(
        "--only", nargs="+", choices=KINDS, default=KINDS, metavar="KIND", help=text
    )
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    command.add_argument("--name", default=SUPPRESS, help=RUNNING)
    own = [field for field in Config.__struct_fields__ if field not in ("name", "endpoint")]
    add_pipeline_options(command, own)


def _chaos(arguments: Namespace) -> int:
    options = ChaosOptions(**given_options(arguments, ChaosOptions))
    report = chaos(arguments, options, arguments.only)
    print(as_json(report) if arguments.json else as_table(report))
    return 1 if report["faults"] else 0
