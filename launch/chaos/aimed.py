"""`launch chaos --aimed`: each attack on a pipeline of its own, and what innocent clients saw."""

import contextlib
import itertools
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from penstock.launch.chaos import attacks, process_attacks
from penstock.launch.chaos.victim import Attack, Victim, victim
from penstock.launch.pipeline.errors import LaunchError
from penstock.protocol.client.errors import RequestError

DEFINED = (vars(attacks) | vars(process_attacks)).values()
ATTACKS = [one for one in DEFINED if isinstance(one, Attack)]
LAUNCH = (sys.executable, "-P", "-m", "penstock.launch")
HEAD = "| attack | asked | lost | different | restarted | gateway MiB | pipeline | seen |"


class Result(Struct):
    """Result of one attack."""

    attack: str
    num_asked: int = 0
    num_lost: int = 0
    num_different: int = 0
    num_restarts: int = 0
    peak_bytes: int = 0
    has_ended: bool = False
    seen: str = ""
    reasons: list[str] = []
    is_fault: bool = False

    def fail(self, error: Exception) -> None:
        self.seen, self.is_fault = f"{type(error).__name__}: {error}", True

    def __str__(self) -> str:
        end = "ended" if self.has_ended else "runs"
        numbers = [self.num_asked, self.num_lost, self.num_different]
        restarts, peak = "" if self.has_ended else self.num_restarts, self.peak_bytes >> 20 or ""
        cells = [self.attack, *numbers, restarts, peak, end, self.seen + "".join(self.reasons[:1])]
        return "| " + " | ".join(str(cell).replace("\n", " ")[:120] for cell in cells) + " |"


def aimed(names: list[str], flags: list[str]) -> int:
    """Run the attacks whose names contain one of `names` (all without), and print a line for each.

    Return 1 if one succeeded. Raises LaunchError on another system than Linux.
    """
    if not Path("/proc/self/clear_refs").exists():
        raise LaunchError("--aimed: got a system without /proc, expected Linux, to measure memory")
    print(HEAD, "| --- " * HEAD.count(" | ") + "| --- |", sep="\n", flush=True)
    chosen = [one for one in ATTACKS if not names or any(name in one.name for name in names)]
    results = []
    for result in itertools.chain(_results(chosen, flags), () if names else (symlink(),)):
        print(result, flush=True)
        results.append(result)
    failed = [one.attack for one in results if one.is_fault]
    print(f"{len(results) - len(failed)} of {len(results)} attacks had no effect on others", end="")
    print(f"; these had: {', '.join(failed)}" if failed else "")
    return 1 if failed else 0


def _results(chosen: list[Attack], flags: list[str]) -> Iterator[Result]:
    """Run attacks, on one pipeline as long as it lives and no attack needs its own."""
    with contextlib.ExitStack() as stack:
        shared: Victim | None = None
        for attack in chosen:
            result = Result(attack.name)
            begin = time.monotonic()
            try:
                one = shared
                if attack.needs_own or not one or one.has_ended:
                    stack.close()
                    one = _start(stack, attack, flags)
                    shared = None if attack.needs_own else one
                _attack(attack, one, result)
            except (LaunchError, RequestError, OSError) as error:
                result.fail(error)
                shared = None
            result.seen += f" ({time.monotonic() - begin:.0f} s)"
            yield result


def _start(stack: contextlib.ExitStack, attack: Attack, flags: list[str]) -> Victim:
    stdout = stack.enter_context(_unread_pipe()) if attack.is_output_blocked else subprocess.DEVNULL
    commands = {
        kind: _program(stack, source, arguments)
        for kind, (source, arguments) in attack.programs.items()
    }
    return stack.enter_context(victim(flags, commands, stdout))


def _attack(attack: Attack, one: Victim, result: Result) -> None:
    one.begin()
    innocents = one.innocents
    try:
        result.seen = attack.run(one) or ""
    except Exception as error:  # noqa: BLE001  a line of the table
        result.fail(error)
    innocents.wait()
    result.num_asked, result.num_lost = innocents.num_asked, innocents.num_lost
    result.num_different, result.reasons = innocents.num_different, innocents.reasons
    result.has_ended = one.ends() if attack.ends else one.has_ended
    if not (result.has_ended or attack.ends):
        result.num_restarts = one.num_restarts
        result.peak_bytes = one.peak_bytes()
    is_wrong = result.num_lost or result.num_different or result.has_ended != attack.ends
    result.is_fault |= bool(is_wrong) or "WRONG" in result.seen


def symlink() -> Result:
    """Make a run folder whose parent is a symbolic link: `launch all` refuses it, and leaves it."""
    result = Result("symlinked run folder")
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as theirs:
        (Path(folder) / f"penstock-{os.getuid()}").symlink_to(theirs)
        kept = Path(theirs) / "aimed"
        kept.mkdir(mode=0o755)
        done = subprocess.run(
            [*LAUNCH, "all", "--name", "aimed", "--http", "0"],
            env=os.environ | {"XDG_RUNTIME_DIR": folder},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        is_left = kept.exists() and kept.stat().st_mode & 0o777 == 0o755
        result.seen = (done.stderr.strip().splitlines() or [""])[-1]
        result.has_ended, result.is_fault = True, not (is_left and done.returncode)
    return result


def _program(stack: contextlib.ExitStack, source: str, arguments: str) -> str:
    """Return the command of a process that is started from source text."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    (folder / "program.py").write_text(source)
    words = [*arguments.split(), str(folder / "mark")] if arguments else []
    return shlex.join([sys.executable, "-P", str(folder / "program.py"), *words])


@contextlib.contextmanager
def _unread_pipe() -> Iterator[int]:
    """Yield the writer of a pipe that is full, and nobody reads."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writer, bytes(4096)):
            pass
    os.set_blocking(writer, True)
    yield writer
    os.close(reader)
    os.close(writer)
