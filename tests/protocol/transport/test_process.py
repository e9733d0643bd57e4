"""Duties of every process: an environment that can be read, room for descriptors."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.protocol.transport.process import (
    MAX_DESCRIPTORS,
    raise_descriptor_limit,
)


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("PENSTOCK_TP", "two", "gateway: PENSTOCK_TP: got 'two', expected `int`"),
        ("PENSTOCK_LOG_LEVEL", "loud", "gateway: PENSTOCK_LOG_LEVEL: got 'loud', expected 'debug'"),
        ("PENSTOCK_CONFIG", "/none", "gateway: [Errno 2] No such file or directory: '/none'"),
        ("XDG_RUNTIME_DIR", "/none", "gateway: /none/penstock-"),
    ],
)
def test_an_invalid_environment_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str, value: str, sentence: str
) -> None:
    monkeypatch.delenv("PENSTOCK_CONFIG", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv(variable, value)
    command = [sys.executable, "-P", "-m", "penstock.services.gateway"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (1, "", 1)
    assert ran.stderr.startswith(sentence)


def test_the_soft_limit_of_descriptors_is_raised() -> None:
    code = (
        "import resource as r; "
        "from penstock.protocol.transport.process import raise_descriptor_limit as f; "
        "hard = r.getrlimit(r.RLIMIT_NOFILE)[1]; r.setrlimit(r.RLIMIT_NOFILE, (64, hard)); f(); "
        "print(*r.getrlimit(r.RLIMIT_NOFILE), hard)"
    )
    command = [sys.executable, "-P", "-c", code]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    soft, *hards = map(int, printed.split())
    assert hards[0] == hards[1]
    most = MAX_DESCRIPTORS if hards[0] == resource.RLIM_INFINITY else hards[0]
    assert soft == min(most, MAX_DESCRIPTORS)


def test_a_higher_soft_limit_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = (2 * MAX_DESCRIPTORS, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda *_: pytest.fail("lowered"))
    raise_descriptor_limit()
