"""The reference page of the command line, generated from its parser."""

import argparse
from collections.abc import Iterator

from penstock.launch.commands import cli
from penstock.launch.commands.cli import Parser
from penstock.launch.pipeline.options import flag
from penstock.protocol.config import OPTIONS
from penstock.protocol.messages.sampling import SamplingParams
from tests.docs.markdown import page, table

MANY = 8
"""options of a pipeline, or sampling parameters, from which on a command links to their page"""


def commands() -> str:
    """Return the page of the command line."""
    parser = cli.make_parser()
    rows, sections = [], []
    for name, command, text in _subcommands(parser):
        rows.append(f"[`launch {name}`](#launch-{name}) | {_sentence(text)}")
        sections += _section(f"launch {name}", command, text)
    return page(
        "Commands",
        "`launch COMMAND --help` prints the same with all options of a pipeline.",
        table("command | description", rows),
        *sections,
    )


def _subcommands(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[str, argparse.ArgumentParser, str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            texts = {one.dest: one.help or "" for one in action._choices_actions}
            for name, command in action.choices.items():
                if isinstance(command, Parser):
                    command.load()
                yield name, command, texts.get(name, "")


def _section(name: str, command: argparse.ArgumentParser, text: str) -> Iterator[str]:
    yield f"{'#' * len(name.split())} `{name}`"
    yield _sentence(text)
    actions = [one for one in command._actions if one.dest != "help"]
    subcommands = list(_subcommands(command))
    if subcommands:
        for sub, parser, words in subcommands:
            yield from _section(f"{name} {sub}", parser, words)
        return
    places = [_value(one) for one in actions if not one.option_strings]
    more = " [options]" if any(one.option_strings for one in actions) else ""
    yield f"`{' '.join([name, *places])}{more}`"
    links = {
        "[options of a pipeline](options.md)": set(OPTIONS),
        "[sampling parameters](sampling-parameters.md)": set(SamplingParams.__struct_fields__),
    }
    for link, fields in links.items():
        found = [one for one in actions if _is_of(one, fields)]
        if len(found) >= MANY:
            actions = [one for one in actions if one not in found]
            yield f"Takes {link}, and:" if actions else f"Takes {link}."
    rows = [f"{_shown(one)} | {_help(command, one)}" for one in actions]
    if rows:
        yield table("argument | description", rows)
    if command.epilog:
        yield command.epilog


def _is_of(action: argparse.Action, fields: set[str]) -> bool:
    return action.dest in fields and flag(action.dest) in action.option_strings


def _shown(action: argparse.Action) -> str:
    value = _value(action)
    names = action.option_strings or [""]
    return ", ".join(f"`{f'{one} {value}'.strip()}`" for one in names).replace("|", "\\|")


def _value(action: argparse.Action) -> str:
    """Return what an argument takes, as `--help` shows it."""
    default = action.dest.upper() if action.option_strings else action.dest
    return argparse.HelpFormatter("")._format_args(action, default)


def _help(command: argparse.ArgumentParser, action: argparse.Action) -> str:
    values = vars(action) | {"prog": command.prog}
    text = " ".join(((action.help or "") % values).split())
    return text.replace("|", "\\|")


def _sentence(text: str) -> str:
    text = text.replace("%%", "%")
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."
