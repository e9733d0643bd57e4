"""`launch completion`: the script with which a shell asks `launch` for words; and `launch help`."""

from argparse import ArgumentParser, Namespace

from penstock.launch.commands.cli import make_parser


def add_completion(command: ArgumentParser) -> None:
    command.set_defaults(run=_completion)
    shells = ("bash", "zsh", "fish")
    command.add_argument("shell", choices=shells, metavar="SHELL", help=", ".join(shells))
    command.epilog = (
        'In bash, and in zsh after `compinit`, `eval "$(launch completion bash)"` uses it at once, '
        "and from a start-up file such as ~/.bashrc in each new shell. fish reads "
        "~/.config/fish/completions/launch.fish."
    )


def _completion(arguments: Namespace) -> int:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["launch"], shell=arguments.shell), end="")
    return 0


def add_help(command: ArgumentParser) -> None:
    command.set_defaults(run=_help)
    command.add_argument("words", metavar="COMMAND", nargs="*", help="such as `ask` (default: all)")


def _help(arguments: Namespace) -> int:
    make_parser().parse_args([*arguments.words, "--help"])  # exits
    return 0
