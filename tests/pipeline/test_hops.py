"""The tool that shows the way to the first token."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.hops.__main__ import OVER_HTTP, OVER_ZMQ

pytestmark = pytest.mark.pipeline
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("flags", "way"), [([], OVER_ZMQ), (["--http"], OVER_HTTP)])
def test_each_hop_has_its_times(flags: list[str], way: list[tuple[str, bytes]]) -> None:
    command = [sys.executable, "-m", "tests.tools.hops", "--requests", "3", *flags]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines()]
    hops = rows[2:-2]
    assert [(process, sends.encode()) for process, sends, *_ in hops] == way
    assert all(float(work) > 0 for *_, work, _ in hops)
    # a message may be received before its sender's call has returned
    assert sum(float(wait) + float(work) for _, _, wait, work, _ in hops[1:]) > 0
