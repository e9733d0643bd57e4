"""The way of a request: the functions of ours that run for it in any process of the pipeline.

The limits may only fall. They have room for what runs by chance in all of the requests: on a loaded
machine, a heartbeat or a queue that is not empty.
"""

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import NamedTuple

import pytest

from tests.pipeline.conftest import Pipeline

pytestmark = pytest.mark.pipeline
ROOT = Path(__file__).resolve().parents[2]
TRACER = Path(__file__).parent / "tracer"
SERVER = ("launch", "protocol", "services")
COMPUTATION = ("kernels", "models")
# files, and lines with instructions of their functions that run, for a request until its answer
MAX_SERVER = (40, 2595)
MAX_COMPUTATION = (13, 400)
# files that a start imports, and all of their lines with instructions
MAX_START = (176, 22850)
NUM_REQUESTS = 100
START, REST = 0, 255  # phases; the others are numbers of requests


@pytest.fixture
def phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file that holds the phase; processes that start from now on are traced."""
    file = tmp_path / "phase"
    file.write_bytes(bytes([START]))
    monkeypatch.setenv("PYTHONPATH", str(TRACER))
    monkeypatch.setenv("PENSTOCK_TRACE", str(tmp_path))
    return file


class Calls(NamedTuple):
    """Functions, and what a reader of them opens and reads."""

    lines: frozenset[tuple[Path, int]]

    def __and__(self, other: "Calls") -> "Calls":
        return Calls(self.lines & other.lines)

    @property
    def paths(self) -> set[Path]:
        return {path for path, _ in self.lines}

    @property
    def size(self) -> tuple[int, int]:
        """The number of files, and of lines of their functions."""
        return len(self.paths), len(self.lines)

    def is_within(self, limit: tuple[int, int]) -> bool:
        """Return whether neither the files nor the lines are more than the limit."""
        return 0 < self.size[0] <= limit[0] and self.size[1] <= limit[1]

    def __str__(self) -> str:
        counts = Counter(str(path.relative_to(ROOT)) for path, _ in self.lines)
        return "\n".join(f"{count} {name}" for name, count in sorted(counts.items()))


def calls_in(folder: Path, phase: int, packages: tuple[str, ...]) -> Calls:
    """Return the lines of the functions of some packages that ran in a phase."""
    calls = "".join(path.read_text() for path in folder.glob("*.calls")).splitlines()
    tops = tuple(f"{ROOT / package}/" for package in packages)
    found: set[tuple[Path, int]] = set()
    for call in calls:
        number, lines, name = call.split(" ", 2)
        if int(number) == phase and (path := Path(name).resolve()).as_posix().startswith(tops):
            found.update((path, int(line)) for line in lines.split(","))
    return Calls(frozenset(found))


def code_lines(code: CodeType) -> set[int]:
    """Return the lines with instructions of a module, its classes and its functions."""
    lines = {line for _, _, line in code.co_lines() if line}
    return lines.union(*(code_lines(part) for part in code.co_consts if isinstance(part, CodeType)))


def test_files_of_a_request(phase: Path, pipeline: Callable[..., Pipeline]) -> None:
    """Heartbeats fall into the time of some requests, so the way is what all requests share."""
    server = computation = Calls(frozenset())
    with pipeline().client() as client, phase.open("r+b", buffering=0) as file:
        assert client.generate("17+25=").text == "42"  # what is computed once is left out
        for number in range(1, NUM_REQUESTS + 1):
            os.pwrite(file.fileno(), bytes([number]), 0)
            assert client.generate("17+25=").text == "42"
            os.pwrite(file.fileno(), bytes([REST]), 0)
            found = calls_in(phase.parent, number, SERVER)
            server = server & found if number > 1 else found
            computation = calls_in(phase.parent, number, COMPUTATION)
            if server.is_within(MAX_SERVER):
                break
    start = calls_in(phase.parent, START, SERVER + COMPUTATION).paths
    start_size = len(start), sum(len(code_lines(compile(p.read_text(), p, "exec"))) for p in start)
    assert server.is_within(MAX_SERVER), f"got {server.size}, expected {MAX_SERVER}:\n{server}"
    assert computation.is_within(MAX_COMPUTATION), f"got {computation.size}:\n{computation}"
    assert start_size[0] <= MAX_START[0] and start_size[1] <= MAX_START[1], start_size
