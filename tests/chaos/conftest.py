"""Fixtures of several modules."""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.launch.pipeline.procfile import PROCFILE
from tests.pipeline.conftest import Pipeline, pipeline

__all__ = ["pipeline"]

HERE = Path(__file__).parent
Start = Callable[..., Pipeline]


@pytest.fixture
def start_with(tmp_path: Path) -> Iterator[Start]:
    """Start a pipeline in which a program of this folder takes the place of a service."""
    with contextlib.ExitStack() as stack:

        def start(kind: str, program: str, *flags: str, assignment: str = "") -> Pipeline:
            procfile = tmp_path / "procfile"
            line = f"{kind}: {assignment} python -P {HERE / program}"
            text = re.sub(f"^{kind}: .*$", line, PROCFILE.read_text(), flags=re.MULTILINE)
            procfile.write_text(text)
            running = Pipeline("--procfile", str(procfile), *flags)
            stack.push(running)  # first, so that one that does not become ready is stopped too
            return running.__enter__()

        yield start
