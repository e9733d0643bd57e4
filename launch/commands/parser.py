"""An argument parser whose errors are one sentence, and whose help is short."""

import argparse
import itertools
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NoReturn

from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.options import OTHER_NAMES, flag
from penstock.protocol.config import DISTRIBUTION

MAX_SHOWN_OPTIONS = 12  # options that a usage line lists


class Parser(argparse.ArgumentParser):
    """The parser of `launch` and, by argparse's rules, of each of its commands."""

    module = ""  # module whose `add_arguments` adds the arguments, imported when they are needed

    def load(self) -> None:
        """Add the arguments of `module`, once."""
        module, self.module = self.module, ""
        if module:
            import_module(module).add_arguments(self)

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
        """Return the help; a usage line of many options names the positional arguments only."""
        optional = [one for one in self._actions if one.option_strings]
        if self.usage is None and len(optional) > MAX_SHOWN_OPTIONS:
            positional = [one for one in self._actions if one not in optional]
            self.usage = " ".join(["%(prog)s [options]", *map(_shown, positional)])
        return super().format_help()

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse as argparse does; refuse unknown arguments here, where alternatives are known."""
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
        parsers = [one.choices for one in self._actions if isinstance(one.choices, dict)]
        commands = [*itertools.chain.from_iterable(one.values() for one in parsers)]
        for command in commands:
            command.load()
        return set().union(*(one._option_string_actions for one in commands))

    def _check_options(self, args: Sequence[str]) -> None:
        known = self._option_string_actions
        for name in (one.partition("=")[0] for one in args if one.startswith("-")):
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
    """Return a positional argument as usage lines show it."""
    name = str(positional.metavar or positional.dest)
    return {"?": f"[{name}]", "*": f"[{name} ...]"}.get(str(positional.nargs), name)


class PrintVersion(argparse.Action):
    """A flag that prints the version; the slow import is left until then."""

    def __init__(self, option_strings: Sequence[str], dest: str, **more: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, **more)

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        from importlib.metadata import version

        print(f"penstock {version(DISTRIBUTION)}")
        parser.exit()


def _other_name(option: str) -> str:
    """Our flag for an option of another server."""
    field = option.removeprefix("--").replace("-", "_")
    return flag(OTHER_NAMES.get(field, field))


def _hint(word: str, known: list[str]) -> str:
    bare = {one.lstrip("-"): one for one in known}
    near = get_close_matches(word.lstrip("-"), bare, n=1)
    return f" (did you mean {bare[near[0]]!r}?)" if near else ""
