"""The procfile, with a line per kind of process, `name: command`; process names and numbers."""

import re
import resource
from collections.abc import Iterable
from pathlib import Path

from penstock.launch.pipeline.errors import LaunchError
from penstock.protocol.config import Config

# a link to the procfile at the top of the repository; a copy of it in an installed package
PROCFILE = Path(__file__).parents[1] / "procfile"

# kinds of processes that each model has separately
OF_MODEL = ("tokenizer", "scheduler", "worker", "detokenizer")
# descriptors of the supervisor, which needs the most: sockets and connections of some clients; for
# each process two pipes, a pidfd, a connection and kept memory
BASE, PER_PROCESS = 128, 6
_LINE = re.compile(r"([A-Za-z0-9_-]+):\s*(\S.*)")


def read_procfile(path: Path = PROCFILE) -> dict[str, str]:
    """Return a map from name to command, in the order of the file. Raises LaunchError."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", error)
        raise LaunchError(f"--procfile: {path} can't be read: {reason}") from error
    commands: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise LaunchError(f"{path}:{number} is not `name: command`: {line!r}")
        if match[1] in commands:
            raise LaunchError(f"{path}:{number} names {match[1]} a second time")
        commands[match[1]] = match[2]
    if not commands:
        raise LaunchError(f"--procfile: {path} has no line, expected some of `name: command`")
    return commands


def shell_line(command: str) -> str:
    """Return a command for `sh -c` whose process replaces the shell, so that it receives signals.

    `env` handles the assignments at the begin of a command.
    """
    return f"exec env {command}"


def process_names(config: Config, kinds: Iterable[str]) -> list[str]:
    """Return the names of all processes that run at start."""
    numbers = numbers_at_start(config, kinds)
    return [f"{kind}.{i}" for kind, number in numbers.items() for i in range(1, number + 1)]


def numbers_at_start(config: Config, kinds: Iterable[str]) -> dict[str, int]:
    """Return the number of processes of each kind; for several models, kind `MODEL/worker`."""
    return {
        f"{model.prefix}{kind}": _number(model, kind)
        for kind in kinds
        for model in (config.by_model() if kind in OF_MODEL else [config])
    }


def _number(config: Config, kind: str) -> int:
    numbers = {
        "scheduler": config.dp,
        "worker": (config.tp + config.spare_workers) * config.dp,
        "tokenizer": config.tokenizers,
        "detokenizer": config.detokenizers,
        "http": config.http,
    }
    return numbers.get(kind, 1)


def kind_of(name: str) -> str:
    """Return the procfile's kind of a process: `worker` for `worker.2` and `MODEL/worker.2`."""
    return name.rpartition("/")[2].partition(".")[0]


def stem_of(name: str) -> str:
    """Return the name of a process without its number: `worker`, or `MODEL/worker`."""
    return name.rpartition(".")[0]


def check_open_files(num_processes: int) -> None:
    """Raise LaunchError if the limit of open files is too low for these processes."""
    check_descriptors(
        BASE + PER_PROCESS * num_processes,
        f" for {num_processes} processes; raise the hard limit (`ulimit -n`, LimitNOFILE= of "
        "systemd, --ulimit nofile= of Docker), or start fewer processes",
    )


def check_descriptors(needed: int, advice: str) -> None:
    """Raise LaunchError, which ends with `advice`, if the limit of open files is lower."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        raise LaunchError(f"open files: got a limit of {soft}, expected {needed} or more{advice}")
