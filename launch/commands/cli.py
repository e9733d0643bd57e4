"""The command line of `launch`: an argument parser whose errors are one sentence.

The module of a command is imported when it runs, so that `launch` starts fast.
"""

import argparse
import errno
import itertools
import os
import re
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from io import TextIOWrapper
from typing import Any, NoReturn

from penstock.launch.commands.api_key import hide_api_key
from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.options import OTHER_NAMES, add_options, flag
from penstock.launch.pipeline.procfile import read_procfile
from penstock.protocol.config import DISTRIBUTION, Config

MAX_SHOWN_OPTIONS = 12  # maximum options that a usage line lists
# name → description
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
# module of a command within `penstock.launch`, and the function that adds the arguments; defaults:
# `commands.NAME` and `add_arguments`
MODULES = {
    **dict.fromkeys(("all", "serve"), "commands.start"),
    **dict.fromkeys(read_procfile(), "commands.processes:add_service"),
    **{name: f"commands.processes:add_{name}" for name in ("scale", "restart", "stop", "keys")},
    **{name: f"commands.client:add_{name}" for name in ("ask", "chat")},
    **{name: f"commands.completion:add_{name}" for name in ("completion", "help")},
    # extras, which no other module imports
    **{name: f"extras.{name}" for name in ("batch", "models", "top", "tune")},
    "collect-env": "extras.collect_env",
    "bench": "bench.commands",
    "chaos": "chaos.run",
}
# handling of characters and bytes that a stream's encoding lacks
_UNENCODABLE = {"stdin": "replace", "stdout": "backslashreplace", "stderr": "backslashreplace"}
FIRST_STEPS = """\
Penstock serves Qwen models from a pipeline of small processes.

  launch all                  serve the demo model, on the CPU if there is no GPU
  launch serve MODEL          serve a Qwen checkpoint: its folder, or its name on the
                              Hugging Face Hub, such as Qwen/Qwen3-8B
  launch ask "17+25="         send a prompt from another terminal; or open
                              http://127.0.0.1:8000 in a browser
  launch chat                 chat in the terminal
  launch status               print the processes and the queues
  launch help                 list all commands; launch help COMMAND, its options"""


class Parser(argparse.ArgumentParser):
    """Parser of `launch` and, by argparse's rules, of each of its commands."""

    # `MODULE` or `MODULE:FUNCTION`, which adds the arguments when necessary
    module = ""

    def load(self) -> None:
        """Add the arguments of `module`, only once."""
        module, _, function = self.module.partition(":")
        self.module = ""
        if module:
            getattr(import_module(module), function or "add_arguments")(self)

    def load_named(self, words: Sequence[str]) -> None:
        """Load this parser and, among its commands, those that `words` contain."""
        self.load()
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name in action.choices.keys() & words:
                    action.choices[name].load_named(words)

    def error(self, message: str) -> NoReturn:
        """Raise LaunchError."""
        message = re.sub(r"^argument (\S+): ", r"\1: ", message)
        message = re.sub(r"invalid int value: (.*)$", r"got \1, expected an integer", message)
        message = re.sub(
            "^the following arguments are required: (.*)$",
            r"\1: got nothing, expected a value",
            message,
        )
        raise LaunchError(message)

    def format_help(self) -> str:
        """Return the help; with many options, the usage line shows only positional arguments."""
        optional = [action for action in self._actions if action.option_strings]
        if self.usage is None and len(optional) > MAX_SHOWN_OPTIONS:
            positional = [action for action in self._actions if action not in optional]
            self.usage = " ".join(["%(prog)s [options]", *map(_shown, positional)])
        return super().format_help()

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse like argparse, but refuse unknown arguments here, where alternatives are known."""
        self.load()
        args = sys.argv[1:] if args is None else args
        if self._subparsers:
            self._check_leading_options(args)
        parsed, unknown = super().parse_known_args(args, namespace)
        self._check_options(unknown)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown

    def _check_leading_options(self, args: Sequence[str]) -> None:
        """Refuse unknown options before the command: argparse would take a value for a command."""
        known = self._option_string_actions
        words = iter(args)
        for word in itertools.takewhile(lambda word: word.startswith("-"), words):
            name, _, value = word.partition("=")
            if name not in known and name in self._options_of_commands():
                command = f"`{self.prog} COMMAND {name}`"
                self.error(f"option {name!r} belongs after the command: {command}")
            self._check_options([word])
            if known[name].nargs is None and not value:
                next(words, None)

    def _options_of_commands(self) -> set[str]:
        parsers = [action.choices for action in self._actions if isinstance(action.choices, dict)]
        commands = [*itertools.chain.from_iterable(choices.values() for choices in parsers)]
        for command in commands:
            command.load()
        return set().union(*(command._option_string_actions for command in commands))

    def _check_options(self, args: Sequence[str]) -> None:
        known = self._option_string_actions
        for name in (word.partition("=")[0] for word in args if word.startswith("-")):
            if name not in known:
                hint = _hint(_other_name(name), list(known))
                self.error(f"unknown option {name!r}{hint}; `{self.prog} --help` lists what it has")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = list(map(str, action.choices))
        if isinstance(action, argparse._SubParsersAction):
            hint = _hint(str(value), names)
            self.error(f"unknown command {value!r}{hint}; `{self.prog} --help` lists them all")
        name = "/".join(action.option_strings) or action.metavar or action.dest
        self.error(f"{name}: got {value!r}, expected one of {', '.join(names)}")


def _shown(positional: argparse.Action) -> str:
    """Return a positional argument in the form of usage lines."""
    name = str(positional.metavar or positional.dest)
    return {"?": f"[{name}]", "*": f"[{name} ...]"}.get(str(positional.nargs), name)


class PrintVersion(argparse.Action):
    """Flag that prints the version; the slow import is deferred until then."""

    def __init__(self, option_strings: Sequence[str], dest: str, **more: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, **more)

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        from importlib.metadata import version

        print(f"penstock {version(DISTRIBUTION)}")
        parser.exit()


def _other_name(option: str) -> str:
    """Return Penstock's flag for an option of another server."""
    field = option.removeprefix("--").replace("-", "_")
    return flag(OTHER_NAMES.get(field, field))


def _hint(word: str, known: list[str]) -> str:
    bare = {name.lstrip("-"): name for name in known}
    near = get_close_matches(word.lstrip("-"), bare, n=1)
    return f" (did you mean {bare[near[0]]!r}?)" if near else ""


def main() -> NoReturn:
    """Run the command line and exit.

    Exit codes: 2 for refused commands, 1 for failures, 130 for Ctrl-C, 143 for SIGTERM. These
    signals stop a pipeline, so that `launch all` exits with 0, however far its start has come.
    """
    _prepare_streams()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for the words that may follow
        import argcomplete

        parser = make_parser()
        parser.load_named(os.environ["COMP_LINE"].split())
        argcomplete.autocomplete(parser)  # exits
    is_server = next((word for word in sys.argv[1:] if word in COMMANDS), "") in ("all", "serve")
    # raised as an exception, so that blocks end their processes
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(0 if is_server else 128 + number))
    try:
        try:
            code = _run(sys.argv[1:])
        finally:
            sys.stdout.flush()
    except LaunchError as error:
        print(f"launch: {error}", file=sys.stderr)
        code = 2
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
    except Exception as error:
        if not _is_of_client(error):
            raise
        print(f"launch: {error}", file=sys.stderr)
        code = 1
    sys.exit(code)


def _is_of_client(error: Exception) -> bool:
    """Return whether the error is a ClientError, without the slow import of the client."""
    client = sys.modules.get("penstock.protocol.client.session")
    return client is not None and isinstance(error, client.ClientError)


def _drop_stdout() -> None:
    """Drop output that can't be written to stdout: Python would try again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _prepare_streams() -> None:
    """Open /dev/null for closed standard streams; otherwise new sockets would get their numbers."""
    for name, mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode))
    for name, errors in _UNENCODABLE.items():
        if isinstance(stream := getattr(sys, name), TextIOWrapper):
            stream.reconfigure(errors=errors)


def _check_text(words: list[str]) -> None:
    """Raise LaunchError for a word that is not valid text, since messages can't carry it."""
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
    add_options(parser, Config, ["name"])  # options of commands, which may also follow the command
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        module = MODULES.get(name, f"commands.{name}")
        command.module = f"penstock.launch.{module}"
    return parser
