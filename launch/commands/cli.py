"""The command line. What a command needs is imported when it runs, so that `launch` starts fast."""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.launch.bench.commands import add_bench
from penstock.launch.chaos.commands import add_chaos
from penstock.launch.commands.api_key import hide_api_key, read_api_key
from penstock.launch.commands.options import (
    add_options,
    add_pipeline_options,
    given_options,
    options_table,
)
from penstock.launch.commands.parser import Parser, PrintVersion
from penstock.launch.errors import LaunchError
from penstock.launch.supervisor.procfile import PROCFILE, read_procfile, shell_line
from penstock.protocol.client.errors import ClientError
from penstock.protocol.config import DEFAULT_CLIENT, Config
from penstock.protocol.messages.sampling import SamplingParams

if TYPE_CHECKING:
    from penstock.protocol.client.client import Client

SAMPLING_FIELDS = [field for field in SamplingParams.__struct_fields__ if field != "n"]
SCALABLE = {"tokenizer": 1, "detokenizer": 1, "http": 0}
"""and how many processes of it a pipeline needs"""


FIRST_STEPS = """\
Penstock serves Qwen3 models from a pipeline of small processes.

  launch all                  serve the demo model, on the CPU if there is no GPU
  launch all --model FOLDER   serve a Qwen3 checkpoint
  launch ask "17+25="         ask what is served, from another terminal; or open
                              http://127.0.0.1:8000 in a browser
  launch status               show the processes and the queues
  launch --help               list all commands; launch COMMAND --help, its options"""


def main() -> NoReturn:
    """Runs the command line and exits: 2 for what is refused, 1 for what fails, 130 for Ctrl-C."""
    # what runs is ended with the blocks that run it, and not left behind
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        code = _run(sys.argv[1:])
    except LaunchError as error:
        print(f"launch: {error}", file=sys.stderr)
        code = 2
    except ClientError as error:
        print(f"launch: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # `launch ask … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


def _run(words: list[str]) -> int:
    if not words:
        print(FIRST_STEPS)
        return 0
    arguments = _parser().parse_args(words)
    if getattr(arguments, "api_key", ""):
        hide_api_key()
    return int(arguments.run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="launch",
        description="Runs a pipeline of Penstock, and talks to it.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=PrintVersion, help="print the version, and exit")
    add_options(parser, Config, ["name"])  # of a command, which may follow it, too
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, run: Callable[..., int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.set_defaults(run=run)
        return command

    _add_all(add("all", _all, "start a pipeline and keep it running"))
    for kind in read_procfile():
        command = add(kind, _service, f"run one more {kind} in the foreground of this terminal")
        command.set_defaults(kind=kind)
        add_options(command, Config, ["name"])
    command = add("scale", _scale, "change the number of tokenizers, detokenizers or http")
    command.add_argument("kind", metavar="|".join(SCALABLE))
    command.add_argument("number", type=int)
    add_options(command, Config, ["name"])
    command = add("restart", _restart, "restart a process, a kind, or all in turn; requests go on")
    command.add_argument("target", metavar="PROCESS|KIND|all")
    add_options(command, Config, ["name"])
    command = add("status", _status, "show the processes and the queues")
    command.add_argument("--json", action="store_true", help="for programs")
    add_options(command, Config, ["name"])
    command = add("top", _top, "show processes, queues and speed as they change; q quits")
    command.add_argument("--once", action="store_true", help="print it once")
    add_options(command, Config, ["name"])
    add_options(add("stop", _stop, "stop a pipeline, and wait until it is gone"), Config, ["name"])
    command = add("ask", _ask, "print the answer to one question")
    command.add_argument("question")
    command.add_argument("--raw", action="store_true", help="continue the text; no chat template")
    command.add_argument("--json", action="store_true", help="print the whole reply as JSON")
    _add_client(command)
    _add_client(add("chat", _chat, "talk; Ctrl-C ends an answer, Ctrl-D the conversation"))
    command = add("keys", _keys, "make the keys of a gateway and of its clients")
    command.add_argument(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="to make: server.key, server.key_secret, clients/NAME.key of each client that may "
        "connect, NAME.key_secret for it; a client needs server.key and its NAME.key_secret",
    )
    text = f"add a client to FOLDER (the first one is {DEFAULT_CLIENT!r})"
    command.add_argument("--client", metavar="NAME", help=text)
    text = "run a file of requests in OpenAI's batch format; run again, it goes on where it stopped"
    _add_batch(add("batch", _batch, text))
    text = "measure: the pipeline without a model, or a model's throughput and latency"
    add_bench(commands.add_parser("bench", help=text, description=text, allow_abbrev=False))
    text = "kill processes at random moments of a load, and check every answer"
    add_chaos(commands.add_parser("chaos", help=text, description=text, allow_abbrev=False))
    add("options", _options, "print the options of `launch all` as a markdown table")
    return parser


def _add_all(command: argparse.ArgumentParser) -> None:
    add_options(command, Config)
    command.add_argument(
        "--procfile", type=Path, default=PROCFILE, help="what to run (default: penstock's own)"
    )
    command.add_argument(
        "--max-deaths",
        type=int,
        default=5,
        help="deaths of one process within 60 s that stop the pipeline (default: 5)",
    )


def _add_batch(command: argparse.ArgumentParser) -> None:
    command.add_argument("input", type=Path, metavar="IN.jsonl")
    command.add_argument("output", type=Path, metavar="OUT.jsonl", help="results are added to it")
    command.add_argument(
        "--concurrency", type=int, default=256, help="requests at once (default: 256)"
    )
    add_pipeline_options(command, [one for one in Config.__struct_fields__ if one != "endpoint"])


def _add_client(command: argparse.ArgumentParser) -> None:
    add_options(command, Config, ["name"])
    text = "connect there, not to the pipeline of --name; of A,B,… to the next if one is lost"
    command.add_argument("--endpoint", help=text)
    command.add_argument("--keys", metavar="FOLDER", help="with server.key and NAME.key_secret")
    command.add_argument(
        "--client", metavar="NAME", default=DEFAULT_CLIENT, help="whose key (default: %(default)s)"
    )
    add_options(command, SamplingParams, SAMPLING_FIELDS)


def _all(arguments: argparse.Namespace) -> int:
    from penstock.launch.commands.start import start

    fields = given_options(arguments, Config)
    if fields.get("model"):
        fields["model"] = str(Path(fields["model"]).absolute())
    if fields.get("keys"):
        fields["keys"] = str(Path(fields["keys"]).absolute())
    return start(read_api_key(Config(**fields)), arguments.procfile, arguments.max_deaths)


def _service(arguments: argparse.Namespace) -> int:
    from penstock.launch.run_folder import environment, running_config

    config = running_config(_name(arguments))
    line = shell_line(read_procfile()[arguments.kind])
    os.execvpe("sh", ["sh", "-c", line], environment(config))  # noqa: S606


def _scale(arguments: argparse.Namespace) -> int:
    from penstock.launch.control_client import scale

    if arguments.kind not in SCALABLE:
        *others, last = SCALABLE
        known = f"{', '.join(others)} and {last}"
        raise LaunchError(f"{arguments.kind!r} can't be scaled; {known} can")
    if arguments.number < (least := SCALABLE[arguments.kind]):
        number = arguments.number
        raise LaunchError(f"number is {number}: a pipeline needs {least} {arguments.kind}")
    number = scale(_name(arguments), arguments.kind, arguments.number)
    print(f"{arguments.kind}: {number}")
    return 0


def _restart(arguments: argparse.Namespace) -> int:
    from penstock.launch.control_client import restart

    for names in restart(_name(arguments), arguments.target):
        print(f"{', '.join(names)}: back", flush=True)
    return 0


def _status(arguments: argparse.Namespace) -> int:
    from penstock.launch.commands.status import as_json, as_text, read_status

    status = read_status(_name(arguments))
    print(as_json(status) if arguments.json else as_text(status))
    return 0


def _top(arguments: argparse.Namespace) -> int:
    from penstock.launch.commands.top import top

    return top(_name(arguments), arguments.once)


def _stop(arguments: argparse.Namespace) -> int:
    from penstock.launch.run_folder import stop

    stop(_name(arguments))
    return 0


def _ask(arguments: argparse.Namespace) -> int:
    from penstock.launch.commands.chat import ask

    question: dict[str, Any] = {"prompt": arguments.question}
    if not arguments.raw:
        question = {"messages": [{"role": "user", "content": arguments.question}]}
    with _client(arguments) as client:
        return ask(client, question | given_options(arguments, SamplingParams), arguments.json)


def _chat(arguments: argparse.Namespace) -> int:
    from penstock.launch.commands.chat import chat

    with _client(arguments) as client:
        return chat(client, given_options(arguments, SamplingParams))


def _batch(arguments: argparse.Namespace) -> int:
    from penstock.launch.commands.batch import run_batch

    return run_batch(arguments)


def _keys(arguments: argparse.Namespace) -> int:
    from penstock.launch.commands.keys import make_keys

    print(*make_keys(arguments.folder, arguments.client), sep="\n")
    return 0


def _options(_: argparse.Namespace) -> int:
    print(options_table())
    return 0


def _name(arguments: argparse.Namespace) -> str:
    return str(getattr(arguments, "name", Config().name))


def _client(arguments: argparse.Namespace) -> "Client":
    from penstock.launch.run_folder import running_config
    from penstock.protocol.client.client import Client

    endpoint, keys = arguments.endpoint, arguments.keys
    if endpoint is None:
        config = running_config(_name(arguments))
        endpoint, keys = config.endpoint, keys or config.keys
    return Client(endpoint, keys=keys, client=arguments.client)
