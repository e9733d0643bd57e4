"""`launch completion`: a shell script generated from the parser; and `launch help`."""

import argparse
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import NamedTuple

from penstock.launch.commands.cli import Parser, make_parser

# the place on the command line, such as " bench serve", made of the words before the cursor
FIND = """\
    local word place=
    for word in {words}; do
        case "$place $word" in
            {commands}) place="$place $word" ;;
        esac
    done
    case "$place $previous" in
{values}
    esac
    case $place in
{words_of}
    esac
"""
BASH = """\
# completes `launch` in bash: eval "$(launch completion bash)"
_launch() {{
    local found= previous=${{COMP_WORDS[COMP_CWORD-1]}} current=${{COMP_WORDS[COMP_CWORD]}}
    _launch_find
    COMPREPLY=($(compgen -W "$found" -- "$current"))
}}
_launch_find() {{
{find}}}
complete -o bashdefault -o default -F _launch launch
"""
ZSH = """\
#compdef launch
# completes `launch` in zsh, after compinit: eval "$(launch completion zsh)"
_launch() {{
    local found= previous=${{words[CURRENT-1]}}
    _launch_find
    if [[ -n $found ]]; then compadd -- ${{=found}}; else _files; fi
}}
_launch_find() {{
{find}}}
compdef _launch launch
"""
FISH = """\
# completes `launch` in fish: launch completion fish | source
function __launch_place
    set -l place
    for word in (commandline -opc)[2..]
        switch "$place $word"
            case {commands}
                set place "$place $word"
        end
    end
    test "$place" = "$argv[1]"
end
{lines}
"""
BEFORE_CURSOR = {
    "bash": '"${COMP_WORDS[@]:1:COMP_CWORD-1}"',
    "zsh": '"${(@)words[2,CURRENT-1]}"',
}


class Command(NamedTuple):
    """Words that may follow a place on the command line."""

    place: str  # " bench serve"; empty for `launch` alone
    commands: dict[str, str]  # name → help
    options: list[argparse.Action]
    words: list[str]  # choices of a positional argument


def add_completion(command: ArgumentParser) -> None:
    command.set_defaults(run=_completion)
    shells = ("bash", "zsh", "fish")
    command.add_argument("shell", choices=shells, metavar="SHELL", help=", ".join(shells))
    command.epilog = (
        'In bash and zsh, `eval "$(launch completion bash)"` uses it at once, and from a start-up '
        "file such as ~/.bashrc in each new shell. fish reads "
        "~/.config/fish/completions/launch.fish."
    )


def _completion(arguments: Namespace) -> int:
    commands = list(_commands(make_parser()))
    if arguments.shell == "fish":
        print(_fish(commands), end="")
    else:
        form = BASH if arguments.shell == "bash" else ZSH
        print(form.format(find=_find(commands, arguments.shell)), end="")
    return 0


def _commands(parser: ArgumentParser, place: str = "") -> Iterator[Command]:
    """Yield the words accepted by `parser` and by its commands."""
    if isinstance(parser, Parser):
        parser.load()
    below: dict[str, ArgumentParser] = {}
    texts: dict[str, str] = {}
    options: list[argparse.Action] = []
    words: list[str] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below = action.choices
            texts = {choice.dest: choice.help or "" for choice in action._choices_actions}
        elif action.option_strings:
            options.append(action)
        else:
            words += map(str, action.choices or ())
    yield Command(place, texts, options, words)
    for name, command in below.items():
        yield from _commands(command, f"{place} {name}")


def _takes_value(option: argparse.Action) -> bool:
    return option.nargs != 0


def _choices(option: argparse.Action) -> list[str]:
    return [str(choice) for choice in option.choices or ()]


def _find(commands: list[Command], shell: str) -> str:
    values, words_of = [], []
    for command in commands:
        by_choices: dict[str, list[str]] = {}
        for option in filter(_takes_value, command.options):
            patterns = [shlex.quote(f"{command.place} {name}") for name in option.option_strings]
            by_choices.setdefault(" ".join(_choices(option)), []).extend(patterns)
        for choices, patterns in by_choices.items():
            values.append(f"        {'|'.join(patterns)}) found={shlex.quote(choices)}; return ;;")
        names = [name for option in command.options for name in option.option_strings]
        words = shlex.quote(" ".join([*command.commands, *command.words, *names]))
        words_of.append(f"        {shlex.quote(command.place)}) found={words} ;;")
    return FIND.format(
        words=BEFORE_CURSOR[shell],
        commands="|".join(shlex.quote(command.place) for command in commands[1:]),
        values="\n".join(values),
        words_of="\n".join(words_of),
    )


def _fish(commands: list[Command]) -> str:
    lines = []
    for command in commands:
        condition = f'__launch_place "{command.place}"'
        start = f"complete -c launch -n {_fish_quoted(condition)}"
        for name, text in command.commands.items():
            lines.append(f"{start} -f -a {name} -d {_fish_quoted(text)}")
        if command.words:
            lines.append(f"{start} -f -a {_fish_quoted(' '.join(command.words))}")
        for option in command.options:
            names = [
                f"-{'l' if name.startswith('--') else 's'} {name.lstrip('-')}"
                for name in option.option_strings
            ]
            choices = _choices(option)
            value = f" -x -a {_fish_quoted(' '.join(choices))}" if choices else " -r"
            text = ((option.help or "") % (vars(option) | {"prog": ""})).partition(" (default")[0]
            parts = [start, *names, f"-d {_fish_quoted(text)}"]
            lines.append(" ".join(parts) + value * _takes_value(option))
    places = " ".join(_fish_quoted(command.place) for command in commands[1:])
    return FISH.format(commands=places, lines="\n".join(lines))


def _fish_quoted(text: str) -> str:
    escaped = " ".join(text.split()).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{' ' * text.startswith(' ')}{escaped}'"


def add_help(command: ArgumentParser) -> None:
    command.set_defaults(run=_help)
    text = "a command, such as `status` or `bench serve` (default: all)"
    command.add_argument("words", metavar="COMMAND", nargs="*", help=text)


def _help(arguments: Namespace) -> int:
    make_parser().parse_args([*arguments.words, "--help"])  # exits
    return 0
