"""The command line. A command's module is imported when it runs, so that `launch` starts fast."""

import errno
import os
import signal
import sys
from io import TextIOWrapper
from typing import NoReturn

from penstock.launch.commands.api_key import hide_api_key
from penstock.launch.commands.parser import Parser, PrintVersion
from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.options import add_options
from penstock.launch.pipeline.procfile import read_procfile
from penstock.protocol.client.session import ClientError
from penstock.protocol.config import Config

# name: description
COMMANDS = {
    "all": "start a pipeline and keep it running",
    "serve": "do the same as `launch all`, by the name of vLLM's command",
    **{kind: f"run one more {kind} process in this terminal" for kind in read_procfile()},
    "scale": "change the number of tokenizers, detokenizers or http",
    "restart": "restart processes one after the other, while requests continue",
    "status": "print the processes and the queues",
    "top": "show processes, queues and speed as a live table; q quits",
    "stop": "finish open requests, stop the pipeline and wait for its end",
    "ask": "print the answer to one question",
    "chat": "chat with the model; Ctrl-C ends an answer, Ctrl-D the conversation",
    "keys": "create CURVE keys for a gateway and its clients",
    "batch": "run a file in OpenAI's batch format; run it again to continue",
    "models": "list the models in the cache of the Hugging Face Hub, and the memory they need",
    "tune": "find the fastest matrix products for a model on this GPU, and use them from now on",
    "bench": "measure throughput and latency, with a model or without",
    "chaos": "kill processes at random under load, and check every answer",
    "collect-env": "print versions, hardware and limits, for a report of a problem",
    "completion": "print a script that completes commands in bash, zsh or fish",
    "help": "print the help of a command",
}
# within `penstock.launch`, where it is not `commands.NAME`
MODULES = {
    **dict.fromkeys(read_procfile(), "commands.service"),
    **dict.fromkeys(("all", "serve"), "commands.start"),
    # extras, which nothing else imports
    "batch": "extras.batch",
    "models": "extras.models",
    "tune": "extras.tune",
    "bench": "bench.commands",
    "chaos": "chaos.run",
}
# what becomes of characters and bytes that the encoding of a stream lacks
_UNENCODABLE = {"stdin": "replace", "stdout": "backslashreplace", "stderr": "backslashreplace"}
FIRST_STEPS = """\
Penstock serves Qwen3 models from a pipeline of small processes.

  launch all                  serve the demo model, on the CPU if there is no GPU
  launch serve MODEL          serve a Qwen3 checkpoint: its folder, or its name on the
                              Hugging Face Hub, such as Qwen/Qwen3-8B
  launch ask "17+25="         send a prompt from another terminal; or open
                              http://127.0.0.1:8000 in a browser
  launch chat                 chat in the terminal
  launch status               print the processes and the queues
  launch help                 list all commands; launch help COMMAND, its options"""


def main() -> NoReturn:
    """Run the command line and exit.

    Exit codes: 2 for refused commands, 1 for failures, 130 for Ctrl-C, 143 for SIGTERM. A pipeline
    is stopped by these signals, so that `launch all` then exits with 0, however far it has come.
    """
    _prepare_streams()
    command = next((word for word in sys.argv[1:] if word in COMMANDS), "")
    is_server = command in ("all", "serve")
    # by an exception, so that blocks end what they have started
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(0 if is_server else 128 + number))
    try:
        try:
            code = _run(sys.argv[1:])
        finally:
            sys.stdout.flush()
    except LaunchError as error:
        print(f"launch: {error}", file=sys.stderr)
        code = 2
    except ClientError as error:
        print(f"launch: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 0 if is_server else 128 + signal.SIGINT
    except BrokenPipeError:  # `launch ask … | head`
        _drop_stdout()
        code = 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or error.filename:
            raise
        print(f"launch: {error.strerror}", file=sys.stderr)
        _drop_stdout()
        code = 1
    sys.exit(code)


def _drop_stdout() -> None:
    """Drop what can't be written to stdout: Python would try again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _prepare_streams() -> None:
    """Open /dev/null for closed standard streams, whose numbers the next sockets would get."""
    for name, mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode))
    for name, errors in _UNENCODABLE.items():
        if isinstance(stream := getattr(sys, name), TextIOWrapper):
            stream.reconfigure(errors=errors)


def _check_text(words: list[str]) -> None:
    """Raise LaunchError for a word that is not text, which no message can carry."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise LaunchError(f"got {word!r}, expected text in UTF-8") from None


def _run(words: list[str]) -> int:
    if not words:
        print(FIRST_STEPS)
        return 0
    _check_text(words)
    arguments = make_parser().parse_args(words)
    if getattr(arguments, "api_key", ""):
        hide_api_key()
    return int(arguments.run(arguments))


def make_parser() -> Parser:
    """Return the parser of `launch`."""
    parser = Parser(
        prog="launch", description="Start, use and manage a Penstock pipeline.", allow_abbrev=False
    )
    parser.add_argument("--version", action=PrintVersion, help="print the version and exit")
    add_options(parser, Config, ["name"])  # of a command, after which it may be given, too
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        module = MODULES.get(name, f"commands.{name.replace('-', '_')}")
        command.module = f"penstock.launch.{module}"
    return parser
