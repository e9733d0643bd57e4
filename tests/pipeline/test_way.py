"""The way of a request: the files of ours that run code for it in any process of the pipeline.

The limits may only fall. They have about 1 % of room, for a line more or a file that runs by chance
at the start.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pipeline.conftest import Pipeline

pytestmark = pytest.mark.pipeline
ROOT = Path(__file__).resolve().parents[2]
TRACER = Path(__file__).parent / "tracer"
SERVER = ("launch", "protocol", "services")
COMPUTATION = ("kernels", "models")
MAX_SERVER = (43, 6500)
"""files and their lines from the receipt of a request to its answer, without the computation"""
MAX_COMPUTATION = (13, 1680)
MAX_START = (260, 30000)
NUM_REQUESTS = 100
START, REST = 0, 255
"""phases; the others are numbers of requests"""


@pytest.fixture
def phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file that holds the phase; processes that start from now on are traced."""
    file = tmp_path / "phase"
    file.write_bytes(bytes([START]))
    monkeypatch.setenv("PYTHONPATH", str(TRACER))
    monkeypatch.setenv("PENSTOCK_TRACE", str(tmp_path))
    return file


def files_in(folder: Path, phase: int, packages: tuple[str, ...]) -> set[Path]:
    """Return the files of some packages that ran code in a phase."""
    calls = "".join(path.read_text() for path in folder.glob("*.calls")).splitlines()
    names = [call.removeprefix(f"{phase} ") for call in calls if call.startswith(f"{phase} ")]
    paths = {Path(name).resolve() for name in names}
    tops = tuple(f"{ROOT / package}/" for package in packages)
    return {path for path in paths if str(path).startswith(tops)}


def size(paths: set[Path]) -> tuple[int, int]:
    """Return how many files there are, and their lines."""
    return len(paths), sum(len(path.read_text().splitlines()) for path in paths)


def is_within(paths: set[Path], limit: tuple[int, int]) -> bool:
    """Return whether neither the files nor their lines are more than the limit."""
    num_files, num_lines = size(paths)
    return 0 < num_files <= limit[0] and num_lines <= limit[1]


def test_files_of_a_request(phase: Path, pipeline: Callable[..., Pipeline]) -> None:
    """Heartbeats fall into the time of some requests, so the way is what all requests share."""
    server: set[Path] = set()
    computation: set[Path] = set()
    with pipeline().client() as client, phase.open("r+b", buffering=0) as file:
        assert client.generate("17+25=").text == "42"  # what is computed once is left out
        for number in range(1, NUM_REQUESTS + 1):
            os.pwrite(file.fileno(), bytes([number]), 0)
            assert client.generate("17+25=").text == "42"
            os.pwrite(file.fileno(), bytes([REST]), 0)
            found = files_in(phase.parent, number, SERVER)
            server = server & found if number > 1 else found
            computation = files_in(phase.parent, number, COMPUTATION)
            if is_within(server, MAX_SERVER):
                break
    start = files_in(phase.parent, START, SERVER + COMPUTATION)
    problems = ""
    for paths, limit in ((server, MAX_SERVER), (computation, MAX_COMPUTATION), (start, MAX_START)):
        if not is_within(paths, limit):
            listed = sorted(str(path.relative_to(ROOT)) for path in paths)
            problems += f"got {size(paths)}, expected at most {limit}:\n" + "\n".join(listed) + "\n"
    assert not problems, problems
